import pytest

pytest.importorskip("torch_geometric")


def test_batches_of_graphs(compared):
    alone, together = compared("geometric_graphs")

    assert alone.read == [64] * 3
    assert together.read == [32] * 3
