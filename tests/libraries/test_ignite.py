import pytest

pytest.importorskip("ignite")


def test_trainer_evaluators_and_checkpoints(compared):
    alone, together = compared("ignite_trainer")

    assert alone.read == [64] * 5
    assert together.read in ([32, 64, 32, 32, 32], [32, 32, 32, 32, 32])
