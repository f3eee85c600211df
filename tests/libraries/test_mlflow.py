import pytest

pytest.importorskip("mlflow")


def test_the_run_is_rank_zeros(compared):
    alone, together = compared("mlflow_run")

    assert alone.read == [48] * 3
    assert together.read == [24] * 3
    assert together.results[-1] == {"runs": 1}
