import pytest

pytest.importorskip("tensorboard")


def test_rank_0_alone_writes_events(compared):
    alone, together = compared("tensorboard_writer")

    assert alone.read == [48] * 3
    assert together.read == [24] * 3
    assert together.files == ["final.pt", "runs/events.out.tfevents.#", "runs/hparams/events.out.tfevents.#"]
