import pytest

pytest.importorskip("poutyne")


def test_fit_with_checkpoints(compared):
    alone, together = compared("poutyne_fit")

    assert alone.read == [64] * 5
    assert together.read == [32] * 5
