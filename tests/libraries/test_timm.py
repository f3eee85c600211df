import pytest

pytest.importorskip("timm")


def test_average_of_weights_and_schedule(compared):
    alone, together = compared("timm_ema")

    assert alone.read == [64] * 4
    assert together.read == [32] * 4
