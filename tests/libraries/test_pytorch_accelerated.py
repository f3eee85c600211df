import pytest

pytest.importorskip("pytorch_accelerated")


def test_trainer_evaluates_stops_early_and_saves_the_best(compared):
    alone, together = compared("pytorch_accelerated_trainer")

    assert alone.read == [64] * 4
    assert together.read == [32] * 4
