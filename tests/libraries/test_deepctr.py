import pytest

pytest.importorskip("deepctr_torch")


def test_fit_whose_loss_is_a_sum(compared):
    alone, together = compared("deepctr_fit", options=["--loss", "sum"])

    assert alone.read == [64] * 3
    assert together.read == [32] * 3
