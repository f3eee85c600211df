"""Plain scripts that have never heard of parwrap, under other strategies than DDP."""

from __future__ import annotations

import contextlib

import pytest

from test_scripts import SCRIPTS, UNSEEDED, parameters, run

ONE_VECTOR = {"lbfgs_closure"}
"""LBFGS cannot be sharded."""

BY_HAND = {"manual_sgd", "manual_sgd_leaf_tensors", "gradients_kept"}
"""No optimizer steps, so that nothing is averaged."""

DECIDES = {"break_in_epoch", "early_leaver_two_optimizers", "grows_until_good", "stops_early_and_loads_the_best"}
"""They stop on a loss, which is each rank's own under local SGD."""

OF_WORKERS = {"cast_and_grown", "own_amp"}
"""They cast what servers hold, and scale losses."""

pytestmark = [pytest.mark.slow, pytest.mark.ranks(2, fresh=True)]


def trained(script, **options):
    from parwrap.decorators.distributed import script_scope

    return parameters(run(script, script_scope(**options))[0])


@pytest.mark.needs_torch(2, 10, why="strategy='fsdp' does")
@pytest.mark.parametrize(
    "script", [script for script in SCRIPTS if script.stem not in ONE_VECTOR | UNSEEDED], ids=lambda script: script.stem
)
def test_zero1_trains_what_ddp_trains_and_fsdp_up_to_the_order_of_sums(script, tmp_path, monkeypatch):
    import torch

    weights = {}
    for strategy in ("ddp", "zero1", "fsdp"):
        (tmp_path / strategy).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / strategy)
        weights[strategy] = trained(script, strategy=strategy, seed=3)

    for key, value in weights["ddp"].items():
        assert (key, True) == (key, torch.equal(value, weights["zero1"][key]))
        actual = weights["fsdp"][key]  # at the end of a script its models stay in shards
        actual = actual.full_tensor() if hasattr(actual, "full_tensor") else actual
        torch.testing.assert_close(actual, value, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("script", [script for script in SCRIPTS if script.stem not in BY_HAND | DECIDES], ids=lambda script: script.stem)
def test_local_sgd_ends_with_the_same_weights_on_all_ranks(script, tmp_path, monkeypatch):
    import torch

    import parwrap

    monkeypatch.chdir(tmp_path)
    weights = trained(script, strategy="local_sgd", every=3, seed=3)
    first, other = parwrap.gather(weights)

    assert [] == [key for key, value in first.items() if not torch.equal(value, other[key])]


@pytest.mark.ranks(3, fresh=True)
@pytest.mark.parametrize(
    "script", [script for script in SCRIPTS if script.stem not in BY_HAND | ONE_VECTOR | OF_WORKERS], ids=lambda script: script.stem
)
def test_workers_that_step_together_end_with_the_same_weights(script, tmp_path, monkeypatch):
    import torch

    import parwrap

    monkeypatch.chdir(tmp_path)
    weights = None
    with contextlib.suppress(UnboundLocalError):  # a server leaves the script at its first backward
        weights = trained(script, strategy="parameter_server", staleness=0, seed=3)
    first, other, _ = parwrap.gather(weights)

    assert [] == [key for key, value in first.items() if not torch.equal(value, other[key])]
