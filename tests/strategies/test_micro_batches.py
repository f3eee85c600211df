"""A script that accumulates by hand and sends the gradients of every batch is told once what sends them once a step."""

from __future__ import annotations

import contextlib
from itertools import cycle

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parwrap

K = 2
SAID = "backwards for each step"


class Training:
    """What the loops below train, and on what."""

    def __init__(self):
        torch.manual_seed(0)
        self.model, self.other = nn.Linear(3, 1), nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.loader = parwrap.shard(DataLoader(TensorDataset(torch.randn(48, 3)), batch_size=2))

    def loss(self, x):
        return self.model(x).square().mean()

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


def by_hand(t):
    for i, (x,) in enumerate(t.loader, 1):
        (t.loss(x) / K).backward()
        if i % K == 0:
            t.step()


def keeping_zeros(t):
    for i, (x,) in enumerate(t.loader, 1):
        t.loss(x).backward()
        if i % K == 0:
            t.optimizer.step()
            t.optimizer.zero_grad(set_to_none=False)


def two_optimizers(t):
    bias = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    for i, (x,) in enumerate(t.loader, 1):
        (t.loss(x) + bias.param_groups[0]["params"][0].square().sum()).backward()
        if i % K == 0:
            for each in (t.optimizer, bias):
                each.step()
                each.zero_grad()


def two_losses_of_a_line(t):
    for (x,) in t.loader:
        for loss in (t.loss(x), t.model(x).abs().mean()):
            loss.backward()
        t.step()


def two_lines(t):
    batches = iter(t.loader)
    for (x,) in batches:
        t.loss(x).backward()
        t.loss(next(batches)[0]).backward()
        t.step()


def two_loaders(t):
    both = iter(t.loader), iter(parwrap.shard(DataLoader(t.loader.dataset, 2)))
    for batches in both:
        next(batches)
    for loaders in cycle([both]):
        for batches in loaders:
            if (batch := next(batches, None)) is None:
                return
            t.loss(batch[0]).backward()
        t.step()


def gan(t):
    judge = torch.optim.SGD(t.other.parameters(), lr=0.01)
    for (x,) in t.loader:
        for optimizer, loss in ((judge, lambda x: t.other(t.model(x).detach())), (t.optimizer, lambda x: t.other(t.model(x)))):
            optimizer.zero_grad()
            loss(x).square().mean().backward()
            optimizer.step()


def sharpness_aware(t):
    for (x,) in t.loader:
        for sign in (1, -1):
            t.loss(x).backward()
            with torch.no_grad():
                t.model.weight.add_(t.model.weight.grad, alpha=0.01 * sign)
        t.step()


def gradient_penalty(t):
    for (x,) in t.loader:
        x.requires_grad_()
        (grad,) = torch.autograd.grad(t.model(x).sum(), x, create_graph=True)
        for loss in (t.loss(x), grad.square().sum()):
            loss.backward()
        t.step()


def closure_over_batches(t):
    def closure():
        t.optimizer.zero_grad()
        for (x,) in t.loader:
            t.loss(x).backward()
        return torch.zeros(())

    for _ in range(5):
        t.optimizer.step(closure)


def batches_clipped_one_by_one(t):
    for i, (x,) in enumerate(t.loader, 1):
        t.loss(x).backward()
        nn.utils.clip_grad_norm_(t.model.parameters(), 0.01)
        if i % K == 0:
            t.step()


def gradients_kept_apart(t):
    """Clears them between batches: their squares are summed, so an average of the sum is something else."""
    squares = torch.zeros(1, 3)
    for i, (x,) in enumerate(t.loader, 1):
        t.optimizer.zero_grad()
        t.loss(x).backward()
        squares += t.model.weight.grad.square()
        if i % K == 0:
            t.model.weight.grad.copy_(squares)
            t.optimizer.step()
            squares.zero_()


def no_sync(t):
    for i, (x,) in enumerate(t.loader, 1):
        with parwrap.no_sync() if i % K else contextlib.nullcontext():
            t.loss(x).backward()
        if i % K == 0:
            t.step()


def plain(t):
    for (x,) in t.loader:
        t.loss(x).backward()
        t.step()


def accumulated_later(t):
    for i, (x,) in enumerate(t.loader):
        t.loss(x).backward()
        if i < 2 or i % K:
            t.step()


def accumulated(t):
    with parwrap.accumulate(K):
        plain(t)


def said(capfd, train, **options):
    parwrap.distributed(**options)(lambda: [train(t := Training()), train(t)])()
    return capfd.readouterr().err.count(SAID)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("train", [by_hand, keeping_zeros, two_optimizers])
def test_accumulation_by_hand_is_said_once(capfd, train):
    assert (parwrap.rank() == 0) == said(capfd, train)


@pytest.mark.ranks(2)
def test_it_says_how_many_batches_and_where(capfd):
    parwrap.distributed(lambda: by_hand(Training()))()
    line = f"test_micro_batches.py:{by_hand.__code__.co_firstlineno + 2} runs {K} backwards for each step"

    assert (parwrap.rank() == 0) == (line in capfd.readouterr().err)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("strategy", "times"), [("zero1", 1), ("fsdp", 0)])
def test_only_strategies_that_no_sync_helps_say_it(capfd, strategy, times):
    assert times * (parwrap.rank() == 0) == said(capfd, by_hand, strategy=strategy)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "train",
    [
        two_losses_of_a_line,
        two_lines,
        two_loaders,
        gan,
        sharpness_aware,
        gradient_penalty,
        closure_over_batches,
        batches_clipped_one_by_one,
        gradients_kept_apart,
        no_sync,
        plain,
        accumulated_later,
        accumulated,
    ],
    ids=lambda each: each.__name__,
)
def test_other_loops_are_told_nothing(capfd, train):
    assert 0 == said(capfd, train)


@pytest.mark.ranks(2)
def test_it_is_not_said_where_lines_are_turned_off(capfd, monkeypatch):
    monkeypatch.setenv("PARWRAP_QUIET", "1")

    assert 0 == said(capfd, by_hand)
