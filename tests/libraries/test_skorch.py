import pytest

pytest.importorskip("skorch")


def test_fit_with_checkpoints_and_a_grid_search(compared):
    alone, together = compared("skorch_fit")

    assert alone.read == [76] * 5
    assert together.read == [38] * 5
