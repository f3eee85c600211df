"""Plain scripts that have never heard of parwrap, with ``batch="global"``: they train what one process trains.

All scripts run on 2 ranks, and of each kind of script one on 1 and 3.
"""

from __future__ import annotations

import contextlib
import io
import random
import runpy
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.py"))

DRAWN_IN_PASSES = {
    *("batchnorm_dropout", "branch_between_two_backwards", "checkpointing", "gan", "stops_early_and_loads_the_best", "wgan_gp"),
    *("workers_with_augmentation", "zipped_loaders"),
}
"""Dropout, noise and augmentation: each rank draws its own (rule 4)."""

UNSEEDED = {"fresh_subset_each_epoch"}
"""They draw from a generator of numpy without a seed, which differs from run to run."""

BEFORE_A_NORM = {
    "break_in_epoch": {"0.bias"},
    "data_parallel": {"module.conv.bias"},
    "freeze_and_unfreeze": {"backbone.0.bias"},
}
"""A batch norm subtracts the bias before it, so its gradient is zero up to rounding, of which Adam makes steps of full size."""

ROUNDED = {"lbfgs_closure", "own_amp"}
"""Half precision and line searches amplify the order of float sums."""

LISTED = {"files_by_listdir"}
"""``os.listdir`` is sorted on ranks (rule 8), and in the order of the file system in one process."""

ROUTED = {"branches"}
"""The way through the model depends on what is in the batch, of which a rank sees a part."""

AS_GOOD = DRAWN_IN_PASSES | UNSEEDED | ROUNDED | LISTED | ROUTED

SLOW = {
    *("asks_for_a_process_group", "batchnorm_dropout", "branches", "checkpointing", "clip_grad_norm", "compiled", "cross_validation"),
    *("files_by_listdir", "fresh_subset_each_epoch", "gan", "gradient_accumulation", "keep_last_three", "labels_from_set", "layer_drop"),
    *("own_ddp_branch", "own_distributed_sampler", "pytorch_quickstart", "reinforce", "sparse_embedding", "trainer_class", "wgan_gp"),
    *("csv_log_and_figures", "tensorboard_writer", "workers_with_augmentation", "zipped_loaders"),
    *("break_in_epoch", "cast_and_grown", "checkpointing_reentrant", "frozen_and_unused", "random_split", "reduce_on_plateau"),
    *("tied_weights", "weighted_sampler"),
}
"""They train longest, or what they use has tests of its own."""

ON_ONE_RANK = {
    "batchnorm_dropout": "draws in passes, and statistics that are shared",
    "branches": "the way through a model that depends on a batch",
    "cross_validation": "loaders with samplers, and numpy's draws",
    "files_by_listdir": "the order of files",
    "lbfgs_closure": "a line search",
    "own_amp": "half precision",
    "own_ddp_branch": "a branch for ranks, hidden variables of the launcher",
    "random_split": "draws outside of passes, from streams that nothing seeds",
    "saved_and_resumed": "files that are written and read",
    "workers_with_augmentation": "draws of workers",
    "zipped_loaders": "several loaders",
}
"""There is nothing to share out or to average, so these must be exactly what one process trains, for other reasons each. Most of them
draw or round differently on more ranks, where they are only as good.
"""

ON_THREE_RANKS = {
    "batchnorm_dropout": "statistics over shares of several lengths",
    "branches": "a model of which a rank trains a part, or another one than the others",
    "cross_validation": "several loaders over parts of a dataset, and models one after another",
    "early_leaver_two_optimizers": "an end that hangs on the loss of all shares",
    "freeze_and_unfreeze": "statistics whose weights can be compared, for the part that is trained",
    "gradient_accumulation": "backwards of shares, several for a step",
    "handmade_batches": "batches without a loader",
    "infinite_loader": "a loader without an end",
    "labels_from_set": "batches that a function of the script puts together",
    "lbfgs_closure": "one batch of all data, several times for a step",
    "manual_sgd_leaf_tensors": "gradients without a module or an optimizer",
    "own_distributed_sampler": "a sampler that shares out by itself",
    "pytorch_quickstart": "a loader in order, and the loss of a last short batch",
    "reduce_on_plateau": "a learning rate that hangs on losses of all shares",
    "shuffled_loader": "what most scripts are",
    "siamese": "batches of several tensors",
    "sparse_embedding": "sparse gradients",
    "weighted_sampler": "a sampler that draws, with the last batch dropped",
    "workers_with_augmentation": "workers",
    "zipped_loaders": "several loaders in one loop",
}
"""A third of a batch is not a whole number of samples in most of them, which two ranks do not show: each way to batches and each way to
average once. What is left is the same code on 2 and on 3 ranks.
"""


def run(script, scope):
    """What the script leaves behind and what it prints, on its own arguments."""
    printed = io.StringIO()
    before, sys.argv = sys.argv, [str(script)]
    try:
        with contextlib.redirect_stdout(printed), scope:
            left = runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv = before
    model = left["model"]
    return model if isinstance(model, dict) else model.state_dict(), printed.getvalue().splitlines()


def parameters(state):
    return {key: value for key, value in state.items() if not key.endswith(("running_mean", "running_var", "num_batches_tracked"))}


def is_as_good(name, value, reference):
    return value >= reference - 0.06 if name == "accuracy" else value <= 2 * reference + 0.02


@pytest.mark.parametrize(
    ("size", "script"),
    [
        pytest.param(
            size,
            script,
            id=f"{size}-{script.stem}",
            marks=[pytest.mark.ranks(size, fresh=True), *([] if size == 2 and script.stem not in SLOW else [pytest.mark.slow])],
        )
        for size, names in ((1, ON_ONE_RANK), (2, [script.stem for script in SCRIPTS]), (3, ON_THREE_RANKS))
        for script in map(SCRIPTS[0].with_stem, names)
    ],
)
def test_a_plain_script_trains_what_one_process_trains(size, script, tmp_path, monkeypatch):
    import numpy as np
    import torch

    import parwrap
    from parwrap.decorators.distributed import script_scope
    from parwrap.decorators.opened_scope import HiddenGroup
    from parwrap.intercept.torch_calls import intercepting
    from parwrap.ranks.group import alone

    for place in ("together", "by_itself"):
        (tmp_path / place).mkdir(exist_ok=True)
    streams = torch.get_rng_state(), np.random.get_state(), random.getstate()
    monkeypatch.chdir(tmp_path / "together")
    with contextlib.ExitStack() as scopes:
        scopes.enter_context(script_scope(batch="global"))
        scopes.enter_context(parwrap.sync_bn())
        state, printed = run(script, scopes)
    trained = parameters(state)

    for rank, theirs in enumerate(parwrap.gather(trained)):
        assert (rank, []) == (rank, [key for key, value in theirs.items() if not torch.equal(value, trained[key])])

    if parwrap.rank() > 0:
        return
    for set_state, kept in zip((torch.set_rng_state, np.random.set_state, random.setstate), streams, strict=True):
        set_state(kept)
    monkeypatch.chdir(tmp_path / "by_itself")
    with alone():
        expected, expected_lines = run(script, intercepting([HiddenGroup()]))

    assert list(expected) == list(state)
    if script.stem in UNSEEDED or (script.stem in AS_GOOD and size > 1):
        name, value = printed[-1].split()
        reference = expected_lines[-1].split()

        assert name == reference[0]
        assert is_as_good(name, float(value), float(reference[1]))
    else:
        for key in parameters(expected).keys() - BEFORE_A_NORM.get(script.stem, set()):
            value = expected[key]
            torch.testing.assert_close(trained[key], value, rtol=1e-5, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")
