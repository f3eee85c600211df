import pytest

pytest.importorskip("d2l")


def test_trainer_trains_and_validates(compared):
    alone, together = compared("d2l_trainer")

    assert alone.read == [64] * 4
    assert together.read == [32] * 4
