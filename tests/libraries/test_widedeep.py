import pytest

pytest.importorskip("pytorch_widedeep")


def test_trainer_validates_stops_early_and_keeps_the_best(compared):
    alone, together = compared("widedeep_trainer")

    assert alone.read == [64] * 4
    assert together.read == [32] * 4
