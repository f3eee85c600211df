"""Plain scripts that have never heard of parwrap, with ``batch="global"`` on 1, 2 and 3 ranks: they train what one process trains."""

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
    "zipped_loaders",
}
"""They train longest, and what they use has tests of its own."""


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
        for size in (1, 2, 3)
        for script in SCRIPTS
    ],
)
def test_a_plain_script_trains_what_one_process_trains(size, script, tmp_path, monkeypatch):
    import numpy as np
    import torch

    import parwrap
    from parwrap.decorators.distributed import HiddenGroup, script_scope
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
