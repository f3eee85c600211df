"""Collectives that are carried out late and reports that are read a step later, as on GPUs, beside hand-written DDP; by a mock of NCCL."""

import contextlib
import io
import runpy
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import parwrap
from lagging_backend import DifferentCollectivesError, as_on_gpus

SCRIPTS = Path(__file__).parents[1] / "scripts"
QUICK = ("branch_between_two_backwards", "freeze_and_unfreeze", "frozen_and_unused", "never_trains", "break_in_epoch")
STEPS = 8


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def train(model, forward, ends=STEPS):
    generator = torch.Generator().manual_seed(dist.get_rank())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(ends):
        optimizer.zero_grad()
        x = torch.randn(4, 6, generator=generator)
        F.cross_entropy(forward(x), torch.randint(3, (4,), generator=generator)).backward()
        optimizer.step()
    return model


def plain(**options):
    model = build()
    return train(model, model, **options)


def by_hand():
    model = build()
    return train(model, DistributedDataParallel(model))


def values(model):
    return [value.clone() for value in model.state_dict().values()]


def same(expected, actual):
    return all(torch.equal(one, other) for one, other in zip(expected, actual, strict=True))


@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0.0001}, {"gradient_as_bucket_view": True}, {"strategy": "zero1"}], ids=str)
@pytest.mark.ranks(2, timeout=60)
def test_weights_are_bit_for_bit_those_of_ddp_by_hand(options, tmp_path):
    expected = by_hand()
    with as_on_gpus(tmp_path) as process_group:
        actual = parwrap.distributed(**options)(plain)()

    assert same([p.detach() for p in expected.parameters()], [p.detach() for p in actual.parameters()])
    assert STEPS <= len(process_group.posted)


@pytest.mark.ranks(2, timeout=60)
def test_shared_statistics_and_gathered_rows_are_those_over_gloo(tmp_path):
    @parwrap.sync_bn
    def train_together():
        weights = values(plain())
        rows = parwrap.gather_with_grad(torch.full((2, 3), parwrap.rank() + 1.0, requires_grad=True))
        return [*weights, rows.detach()]

    expected = parwrap.distributed(train_together)()
    with as_on_gpus(tmp_path):
        actual = parwrap.distributed(train_together)()

    for one, other in zip(expected, actual, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.filterwarnings("ignore:parwrap. rank")
@pytest.mark.ranks(2, timeout=60)
def test_a_rank_that_ends_early_answers_and_takes_the_weights_of_the_other(tmp_path):
    """As over gloo, where all reports are read at once."""
    ends = STEPS - 3 * parwrap.rank()
    expected = values(parwrap.distributed(partial(plain, ends=ends))())
    with as_on_gpus(tmp_path):
        actual = values(parwrap.distributed(partial(plain, ends=ends))())
        everybodys = parwrap.gather(actual)

    assert same(*everybodys)
    assert same(expected, actual)


@pytest.mark.parametrize(
    "script", [pytest.param(each.stem, marks=[] if each.stem in QUICK else pytest.mark.slow) for each in sorted(SCRIPTS.glob("*.py"))]
)
@pytest.mark.ranks(2, timeout=60)
def test_plain_scripts_leave_the_same_weights_on_all_ranks(script, tmp_path, monkeypatch):
    (tmp_path / "together").mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path / "together")
    monkeypatch.setattr(sys, "argv", [script])
    with as_on_gpus(tmp_path):
        with contextlib.redirect_stdout(io.StringIO()), parwrap.distributed.script_scope():
            model = runpy.run_path(str(SCRIPTS / f"{script}.py"), run_name="__main__")["model"]
        weights = model if isinstance(model, dict) else dict(model.named_parameters())
        for others in parwrap.gather({name: value.detach() for name, value in weights.items()}):
            assert weights.keys() == others.keys()
            assert all(torch.equal(weights[name], value) for name, value in others.items())


@pytest.mark.ranks(2)
def test_ranks_that_post_different_collectives_are_found_out(tmp_path):
    with pytest.raises(DifferentCollectivesError, match=r"all-reduce of 3 torch.float(32|64)"), as_on_gpus(tmp_path):
        dist.all_reduce(torch.ones(3) if dist.get_rank() else torch.ones(3, dtype=torch.float64))


@pytest.mark.ranks(2)
def test_what_is_not_waited_for_is_not_there_yet(tmp_path):
    with as_on_gpus(tmp_path):
        sent = torch.ones(2)
        work = dist.all_reduce(sent, async_op=True)
        early = sent.clone()
        work.wait()

    assert ([1.0, 1.0], [2.0, 2.0]) == (early.tolist(), sent.tolist())


@pytest.mark.filterwarnings("ignore:parwrap")
@pytest.mark.ranks(2, timeout=60)
def test_a_new_model_at_the_same_place_ends_the_same_on_all_ranks(tmp_path):
    """Its first gradients are each rank's own, which the ranks learn a step later; then they take rank 0's weights."""

    def train_by_hand():
        generator = torch.Generator().manual_seed(parwrap.rank())
        model = build()
        for step in range(STEPS):
            model = build() if step == STEPS // 2 else model
            model(torch.randn(4, 6, generator=generator)).square().sum().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.01 * p.grad
                    p.grad = None
        return model

    with as_on_gpus(tmp_path):
        model = parwrap.distributed(train_by_hand)()
        weights = parwrap.gather([p.detach() for p in model.parameters()])

    assert same(*weights)
