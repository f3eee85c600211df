import pytest

pytest.importorskip("pytorch_tabnet")


def test_fit_with_synchronized_batch_norms(compared):
    alone, together = compared("tabnet_fit", options=["--sync-bn"])

    assert alone.read == [128] * 4
    assert together.read == [64] * 4
