import pytest

pytest.importorskip("pytorch_metric_learning")


# the trainer asks for the second iterator elsewhere than for the first
@pytest.mark.parametrize(("how", "shares"), [("loop", [32] * 4), ("trainer", [32, 64, 32, 32])])
def test_a_loss_with_its_own_weights(how, shares, compared):
    alone, together = compared("metric_learning", how)

    assert alone.read == [64] * 4
    assert together.read == shares
