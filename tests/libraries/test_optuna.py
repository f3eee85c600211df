import pytest

pytest.importorskip("optuna")


def test_trials_are_pruned_alike(compared):
    alone, together = compared("optuna_study")

    assert set(alone.read) == {48}
    assert set(together.read) == {24}
    assert {"COMPLETE", "PRUNED"} == set(together.results[-1]["states"].split())
