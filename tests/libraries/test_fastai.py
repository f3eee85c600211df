import pytest

pytest.importorskip("fastai")


def test_every_rank_does_the_whole_work(compared):
    alone, together = compared("fastai_learner")

    assert together.read == alone.read == [64] * 3
    assert "all ranks compute the same losses" in together.errors
    assert "No DataLoader of torch is read there" in together.errors
