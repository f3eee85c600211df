"""Collectives that are carried out late and numbers that are read a step later, as on GPUs, beside hand-written DDP: by a mock of NCCL."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from lagging_backend import DifferentCollectivesError, as_on_gpus
from parwrap.decorators.distributed import script_scope
from parwrap.errors import RankMismatchError

SCRIPTS = Path(__file__).parents[1] / "scripts"
QUICK = ("freeze_and_unfreeze", "frozen_and_unused")
KINDS = {
    "backward_inputs": "several losses in a backward, and a backward for a part of the model",
    "batchnorm_dropout": "buffers, and draws within passes",
    "branches": "ranks that train different parts of a model in one step",
    "cast_and_grown": "parameters that change their dtype, and more of them later",
    "checkpointing_reentrant": "backwards within a backward",
    "clip_grad_norm": "gradients that are read before the step, of a recurrent model",
    "cross_validation": "several models, one after another",
    "early_leaver_two_optimizers": "two optimizers of one loss, and an end that hangs on it",
    "freeze_and_unfreeze": "parameters that are trained from a later epoch on",
    "frozen_and_unused": "parameters that get no gradient",
    "gan": "backwards through two models, and gradients that are thrown away",
    "gradient_accumulation": "several backwards for a step",
    "gradients_kept": "gradients that are read and kept without an optimizer",
    "grows_until_good": "a backward that joins in some steps",
    "lbfgs_closure": "backwards within a step",
    "manual_sgd_leaf_tensors": "parameters without a module",
    "own_amp": "a scaler, which reads gradients, and steps that are left out",
    "reinforce": "steps of different length, without a loader",
    "sparse_embedding": "sparse gradients",
    "stops_early_and_loads_the_best": "weights that are saved and loaded while collectives are under way",
    "tied_weights": "a parameter with two names",
    "wgan_gp": "gradients of gradients",
}
"""What each script stands for: when it sends and reads gradients, and what else it sends in between. Every other script does what one of
these does, at the same points of a step.
"""
STEPS = 8


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def train(model, forward, steps=STEPS, before_step=lambda step: None):
    generator = torch.Generator().manual_seed(dist.get_rank())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss = functional.cross_entropy(forward(torch.randn(4, 6, generator=generator)), torch.randint(3, (4,), generator=generator))
        loss.backward()
        before_step(step)
        optimizer.step()
        losses.append(loss.detach())
    return [p.detach() for p in model.parameters()], losses


def plain(**options):
    model = build()
    return train(model, model, **options)


def by_hand():
    model = build()
    return train(model, DistributedDataParallel(model))[0]


def same(expected, actual):
    return all(torch.equal(one, other) for one, other in zip(expected, actual, strict=True))


@pytest.mark.ranks(2, fresh=True)
def test_weights_that_differed_at_the_check_before_are_an_error_though_they_are_equal_now():
    def apart_for_a_step():
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(1, STEPS):
            optimizer.zero_grad()
            model(torch.ones(4, 6)).square().mean().backward()
            with torch.no_grad():
                model.bias.fill_(dist.get_rank() if step == 2 else 0)
            optimizer.step()

    said = r"bias of a Linear .* differs between rank 0 and rank 1 after step 2 \(test_late_collectives\.py:\d+\)"
    with as_on_gpus(), pytest.raises(RankMismatchError, match=said):
        parwrap.distributed(apart_for_a_step)()


@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0.0001}, {"gradient_as_bucket_view": True}], ids=str)
@pytest.mark.ranks(2, fresh=True)
def test_weights_are_bit_for_bit_those_of_ddp_by_hand(options):
    expected = by_hand()
    _, losses = parwrap.distributed(**options)(plain)()
    with as_on_gpus() as process_group:
        actual, late_losses = parwrap.distributed(**options)(plain)()

    assert same(expected, actual)
    assert same(losses, late_losses)
    assert STEPS <= len(process_group.posted)


@pytest.mark.parametrize("script", [pytest.param(each, marks=[] if each in QUICK else pytest.mark.slow) for each in KINDS])
@pytest.mark.ranks(2, fresh=True)
def test_plain_scripts_leave_the_weights_that_they_leave_without_a_gpu(script, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [script])

    def trained(folder):
        (tmp_path / folder).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / folder)
        torch.manual_seed(0)
        with contextlib.redirect_stdout(io.StringIO()), script_scope(seed=0):
            model = runpy.run_path(str(SCRIPTS / f"{script}.py"), run_name="__main__")["model"]
        return model if isinstance(model, dict) else dict(model.named_parameters())

    expected = trained("at-once")
    with as_on_gpus():
        actual = trained("late")

    assert expected.keys() == actual.keys()
    assert same(expected.values(), actual.values())


def apart(at, steps):
    """Rank 1 changes a weight by itself in one of the ``steps``."""
    model = build()

    def change(step):
        if step == at and parwrap.rank() == 1:
            with torch.no_grad():
                model[0].weight += 1

    train(model, model, steps, change)


@pytest.mark.parametrize(("at", "steps"), [(2, 4), (5, 5)], ids=["a check later", "at the end"])
@pytest.mark.ranks(2, fresh=True)
def test_weights_that_go_apart_are_found(at, steps):
    with pytest.raises(RankMismatchError, match="differs between rank 0 and rank 1 after step"), as_on_gpus():
        parwrap.distributed(apart)(at, steps)


@pytest.mark.ranks(2, fresh=True)
def test_different_data_is_found_a_backward_later():
    backwards = []

    def run():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for (x,) in DataLoader(TensorDataset(torch.full((16, 2), float(parwrap.rank()))), 2):
            model(x).sum().backward()
            backwards.append(x)
            optimizer.step()

    with pytest.raises(RankMismatchError, match="different numbers at the same places of the dataset"), as_on_gpus():
        parwrap.distributed(run)()

    assert 1 == len(backwards)


@pytest.mark.ranks(2, fresh=True)
def test_a_loss_that_joins_later_leaves_the_weights_that_it_leaves_without_a_gpu():
    def run():
        torch.manual_seed(0)
        models = nn.Linear(6, 3), nn.Linear(6, 3)
        optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in models]
        for step in range(STEPS):
            x = torch.full((4, 6), parwrap.rank() + 1.0)
            sum(model(x).square().mean() for model in models[: 1 + step // 4]).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach() for model in models for p in model.parameters()]

    expected = parwrap.distributed(run)()
    with as_on_gpus():
        actual = parwrap.distributed(run)()

    assert same(expected, actual)


@pytest.mark.ranks(2, fresh=True)
def test_ranks_that_do_the_same_work_are_told_so(capfd):
    def run():
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(STEPS):
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()

    with as_on_gpus():
        parwrap.distributed(run)()

    if parwrap.rank() == 0:
        assert "all ranks compute the same losses" in capfd.readouterr().err


@pytest.mark.ranks(2, fresh=True)
def test_ranks_that_post_different_collectives_are_found_out():
    with pytest.raises(DifferentCollectivesError, match=r"all-reduce of 3 torch.float(32|64)"), as_on_gpus():
        dist.all_reduce(torch.ones(3) if dist.get_rank() else torch.ones(3, dtype=torch.float64))


@pytest.mark.ranks(2, fresh=True)
def test_a_result_that_is_not_waited_for_is_not_there_yet():
    with as_on_gpus():
        dist.all_reduce(torch.ones(1))  # connects the ranks
        sent = torch.ones(2)
        work = dist.all_reduce(sent, async_op=True)
        early = sent.clone()
        work.wait()

    assert ([1.0, 1.0], [2.0, 2.0]) == (early.tolist(), sent.tolist())
