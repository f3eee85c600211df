import pytest

pytest.importorskip("pytorch_metric_learning")


@pytest.mark.parametrize("how", ["loop", "trainer"])
def test_a_loss_with_its_own_weights(how, compared):
    alone, together = compared("metric_learning", how)

    assert alone.read == [64] * 4
    assert together.read == [32] * 4
