"""Loops that draw batches before they train on them, with parts that count differently, against one process with whole batches."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parwrap


def numbers(samples):
    x = torch.linspace(-1, 1, samples, dtype=torch.float64).view(-1, 1)
    return TensorDataset(torch.cat([x, x**2], dim=1), x**3)


class Trained:
    def __init__(self):
        self.model = nn.Linear(2, 1).double()
        with torch.no_grad():
            self.model.weight.fill_(0.5), self.model.bias.zero_()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, x, y, times=1):
        for _ in range(times):
            self.optimizer.zero_grad()
            nn.functional.mse_loss(self.model(x), y).backward()
            self.optimizer.step()

    @property
    def weights(self):
        return torch.cat([p.detach().flatten() for p in self.model.parameters()]).tolist()


def one_at_a_time(samples, times):
    trained = Trained()
    for _ in range(2):
        for x, y in DataLoader(numbers(samples), batch_size=8):
            trained.step(x, y, times)
    return trained.weights


def one_ahead(samples, times):
    """As in a prefetcher that copies the next batch while the model computes."""
    trained = Trained()
    for _ in range(2):
        batches = iter(DataLoader(numbers(samples), batch_size=8))
        following = next(batches, None)
        while following is not None:
            x, y = following
            following = next(batches, None)
            trained.step(x, y, times)
    return trained.weights


def two_ahead(samples, times):
    trained = Trained()
    for _ in range(2):
        queue = deque()
        for batch in DataLoader(numbers(samples), batch_size=8):
            queue.append(batch)
            if len(queue) > 2:
                trained.step(*queue.popleft(), times)
        while queue:
            trained.step(*queue.popleft(), times)
    return trained.weights


def first_left_out(samples, times):
    """The first batch is not trained on, which looks like a loop that draws ahead."""
    trained = Trained()
    for _ in range(2):
        for index, (x, y) in enumerate(DataLoader(numbers(samples), batch_size=8)):
            if index:
                trained.step(x, y, times)
    return trained.weights


def a_pass_inside(samples, times):
    trained = Trained()
    other = DataLoader(numbers(7), batch_size=3)
    for x, y in DataLoader(numbers(samples), batch_size=8):
        for u, v in other:
            trained.step(u, v)
        trained.step(x, y, times)
    return trained.weights


def one_by_next(samples, times):
    trained = Trained()
    loader = DataLoader(numbers(samples), batch_size=7)
    for _ in range(3):
        x, y = next(iter(loader))
        trained.step(x, y, times)
    return trained.weights


@pytest.mark.ranks(2)
@pytest.mark.parametrize("loop", [one_at_a_time, one_ahead, two_ahead, first_left_out, a_pass_inside, one_by_next])
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_a_loss_counts_by_the_batch_in_its_backward(loop):
    for samples, times in [(32, 1), (33, 1), (35, 1), (37, 1), (43, 2)]:
        expected = loop(samples, times)
        with parwrap.distributed(batch="global"):
            actual = loop(samples, times)

        assert expected == pytest.approx(actual, abs=1e-12), samples


def endless(loader):
    while True:
        yield from loader


def two_loaders(together):
    """As in semi-supervised training: a loss of each loader's batch; 7 and 12 samples divide differently over 2 ranks."""
    trained = Trained()
    labelled, unlabelled = DataLoader(numbers(28), batch_size=7), endless(DataLoader(numbers(24), batch_size=12))
    for (x, y), (other, _) in zip(labelled, unlabelled, strict=False):
        trained.optimizer.zero_grad()
        loss, penalty = nn.functional.mse_loss(trained.model(x), y), trained.model(other).square().mean()
        if together:
            (loss + penalty).backward()
        else:
            loss.backward()
            penalty.backward()
        trained.optimizer.step()
    unlabelled.close()
    return trained.weights


@pytest.mark.ranks(2)
def test_the_losses_of_two_loaders_count_by_their_batches_each_in_its_backward():
    expected = two_loaders(together=True)

    with parwrap.distributed(batch="global"):
        assert expected == pytest.approx(two_loaders(together=False), abs=1e-12)
    with pytest.raises(parwrap.UsageError, match=r"one backward for batches of the loaders at .* Call backward for each loss"):
        parwrap.distributed(batch="global")(two_loaders)(together=True)


def a_pass_inside_of_the_batch():
    """As a boundary condition beside each batch of points: the inner loop has ended before the backward on both losses."""
    trained = Trained()
    boundary = DataLoader(numbers(8), batch_size=4)
    for x, y in DataLoader(numbers(33), batch_size=11):
        for u, v in boundary:
            penalty = nn.functional.mse_loss(trained.model(u), v)
        trained.optimizer.zero_grad()
        (nn.functional.mse_loss(trained.model(x), y) + penalty).backward()
        trained.optimizer.step()
    return trained.weights


@pytest.mark.ranks(2)
def test_a_loss_of_a_loop_that_has_ended_inside_of_the_batch_counts_by_its_own_batch():
    with pytest.raises(parwrap.UsageError, match=r"one backward for batches of the loaders at .* Call backward for each loss"):
        parwrap.distributed(batch="global")(a_pass_inside_of_the_batch)()
