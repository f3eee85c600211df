import pytest

pytest.importorskip("schedulefree")


def test_optimizer_with_modes(compared):
    alone, together = compared("schedulefree_loop")

    assert alone.read == [64] * 4
    assert together.read == [32] * 4
