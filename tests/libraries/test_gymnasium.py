import pytest

pytest.importorskip("gymnasium")


def test_a_dqn_without_a_loader_is_whole(compared):
    _, together = compared("gymnasium_dqn")

    assert "all ranks compute the same losses" in together.errors
