import pytest

pytest.importorskip("darts")


def test_nbeats_stops_early_predicts_and_loads_the_best(compared):
    compared("darts_nbeats")
