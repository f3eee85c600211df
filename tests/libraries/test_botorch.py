import pytest

pytest.importorskip("botorch")


def test_a_bayesian_optimization_is_whole(compared):
    _, together = compared("botorch_loop")

    assert "all ranks compute the same losses" in together.errors
