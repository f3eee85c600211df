import pytest

pytest.importorskip("pykeen")


def test_pipeline_trains_and_evaluates(compared):
    alone, together = compared("pykeen_lcwa")

    assert alone.read == [471] * 5
    assert sum(together.read) <= 5 * (236 + 1)
