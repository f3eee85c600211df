"""Plain scripts that have never heard of parwrap, under other strategies than DDP: of each kind of script one."""

from __future__ import annotations

import contextlib

import pytest

from test_scripts import SCRIPTS, parameters, run

SHARDED, AVERAGED, SERVED = "zero1 and fsdp", "local_sgd", "parameter_server"
EVERYWHERE = {SHARDED, AVERAGED, SERVED}

KINDS = {
    "backward_inputs": (EVERYWHERE, "several losses in a backward, and a backward for a part of the model"),
    "batchnorm_dropout": (EVERYWHERE, "buffers, and draws within passes"),
    "branches": (EVERYWHERE, "ranks that train different parts of a model in one step, and a part that none trains"),
    "cast_and_grown": ({SHARDED, AVERAGED}, "parameters that change their dtype, and more of them later"),
    "checkpoint_in_open_file": (EVERYWHERE, "weights that are saved and loaded while training goes on"),
    "checkpointing": ({SHARDED}, "parameters that a backward needs again for a forward in it"),
    "checkpointing_reentrant": ({SHARDED, SERVED}, "such forwards one within another, in backwards of their own"),
    "clip_grad_norm": (EVERYWHERE, "a recurrent model, and a norm over all gradients"),
    "compiled": ({SHARDED}, "a compiled forward"),
    "cross_validation": (EVERYWHERE, "several models with optimizers, one after another"),
    "data_parallel": ({SHARDED}, "a model within another kind of parallel model"),
    "early_leaver_two_optimizers": ({SHARDED, SERVED}, "two optimizers of one loss, and an end that hangs on it"),
    "ema_deepcopy": (EVERYWHERE, "a copy of the model, and weights that are read after each step"),
    "freeze_and_unfreeze": (EVERYWHERE, "parameters that are trained from a later epoch on"),
    "gan": (EVERYWHERE, "two optimizers that step in turns, and gradients that one of them throws away"),
    "gradient_accumulation": (EVERYWHERE, "several backwards for a step"),
    "gradients_kept": ({SHARDED}, "no optimizer, and gradients that the script keeps"),
    "grows_until_good": ({SHARDED, SERVED}, "optimizers that share parameters, one after another"),
    "handmade_batches": ({SHARDED}, "no loader"),
    "lbfgs_closure": ({AVERAGED}, "a closure"),
    "manual_sgd_leaf_tensors": ({SHARDED}, "no module"),
    "method_other_than_forward": ({SHARDED}, "a forward that no module has"),
    "never_trains": (EVERYWHERE, "no backward"),
    "one_cycle": (EVERYWHERE, "a scheduler of learning rate and momentum"),
    "own_amp": ({SHARDED, AVERAGED}, "a scaler of the script's own"),
    "reinforce": ({AVERAGED, SERVED}, "no loader, so that ranks train as long as episodes last"),
    "saved_and_resumed": (EVERYWHERE, "the states of an optimizer and a scheduler, saved and loaded by new ones"),
    "shuffled_loader": (EVERYWHERE, "what most scripts are"),
    "siamese": ({SHARDED}, "two forwards for a backward"),
    "sparse_embedding": (EVERYWHERE, "sparse gradients"),
    "stops_early_and_loads_the_best": ({SHARDED, SERVED}, "weights that are saved within an epoch, when the loss says so"),
    "tensorboard_writer": ({SHARDED}, "a weight that is read by itself"),
    "tied_weights": (EVERYWHERE, "a parameter with two names"),
    "wgan_gp": ({SHARDED, SERVED}, "gradients of gradients"),
    "zipped_loaders": (EVERYWHERE, "several loaders, and a forward without gradients in a training pass"),
}
"""What each script stands for, and under which strategies it runs here: a strategy sees optimizers, parameters and backwards, and the same
ones in another script add nothing. Data, files and printing are the same code under all strategies, and ``test_scripts.py`` runs those.

LBFGS cannot be sharded. Without an optimizer that steps, nothing is averaged or served. Scripts that stop on a loss have another one on
each rank under local SGD. Servers hold no casts, and scale no losses.
"""

pytestmark = [pytest.mark.slow, pytest.mark.ranks(2, fresh=True)]


def standing_for_kinds(under):
    chosen = [SCRIPTS[0].with_stem(name) for name, (strategies, _) in KINDS.items() if under in strategies]
    return pytest.mark.parametrize("script", chosen, ids=lambda script: script.stem)


def trained(script, **options):
    from parwrap.decorators.distributed import script_scope

    return parameters(run(script, script_scope(**options))[0])


@pytest.mark.needs_torch(2, 10, why="strategy='fsdp' does")
@standing_for_kinds(under=SHARDED)
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


@standing_for_kinds(under=AVERAGED)
def test_local_sgd_ends_with_the_same_weights_on_all_ranks(script, tmp_path, monkeypatch):
    import torch

    import parwrap

    monkeypatch.chdir(tmp_path)
    weights = trained(script, strategy="local_sgd", every=3, seed=3)
    first, other = parwrap.gather(weights)

    assert [] == [key for key, value in first.items() if not torch.equal(value, other[key])]


@pytest.mark.ranks(3, fresh=True)
@standing_for_kinds(under=SERVED)
def test_workers_that_step_together_end_with_the_same_weights(script, tmp_path, monkeypatch):
    import torch

    import parwrap

    monkeypatch.chdir(tmp_path)
    weights = None
    with contextlib.suppress(UnboundLocalError):  # a server leaves the script at its first backward
        weights = trained(script, strategy="parameter_server", staleness=0, seed=3)
    first, other, _ = parwrap.gather(weights)

    assert [] == [key for key, value in first.items() if not torch.equal(value, other[key])]
