"""Loops that draw batches before they train on them, with parts that count differently, against one process with whole batches."""

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
    """A model and what trains it."""

    def __init__(self, criterion=nn.functional.mse_loss):
        self.model = nn.Linear(2, 1).double()
        with torch.no_grad():
            self.model.weight.fill_(0.5), self.model.bias.zero_()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.criterion = criterion

    def step(self, x, y, times=1):
        for _ in range(times):
            self.optimizer.zero_grad()
            self.criterion(self.model(x), y).backward()
            self.optimizer.step()

    @property
    def weights(self):
        return torch.cat([p.detach().flatten() for p in self.model.parameters()]).tolist()


def plain(samples, epochs=2, times=1):
    trained = Trained()
    for _ in range(epochs):
        for x, y in DataLoader(numbers(samples), batch_size=8):
            trained.step(x, y, times)
    return trained.weights


def one_ahead(samples, change=lambda x: x, times=1):
    """As in a prefetcher that copies the next batch while the model computes."""
    trained = Trained()
    for _ in range(2):
        batches = iter(DataLoader(numbers(samples), batch_size=8))
        following = next(batches, None)
        while following is not None:
            x, y = (change(each) for each in following)
            following = next(batches, None)
            trained.step(x, y, times)
    return trained.weights


def several_ahead(samples, change=lambda x: x, times=1, ahead=3):
    trained = Trained()
    for _ in range(2):
        queue = deque()
        for batch in DataLoader(numbers(samples), batch_size=8):
            queue.append([change(each) for each in batch])
            if len(queue) > ahead:
                trained.step(*queue.popleft(), times)
        while queue:
            trained.step(*queue.popleft(), times)
    return trained.weights


def left_out(samples, change=lambda x: x, times=1):
    """The first batch is not trained on, and then a prefetcher would look the same."""
    trained = Trained()
    for _ in range(2):
        for index, (x, y) in enumerate(DataLoader(numbers(samples), batch_size=8)):
            if index:
                trained.step(change(x), change(y), times)
    return trained.weights


def inside(samples, change=lambda x: x, times=1):
    """A pass over another loader before each batch's step."""
    trained = Trained()
    other = DataLoader(numbers(7), batch_size=3)
    for x, y in DataLoader(numbers(samples), batch_size=8):
        for u, v in other:
            trained.step(u, v)
        trained.step(change(x), change(y), times)
    return trained.weights


@pytest.mark.parametrize("size", [pytest.param(size, marks=pytest.mark.ranks(size)) for size in (2, 3)])
@pytest.mark.parametrize("loop", [one_ahead, several_ahead, left_out, inside])
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_parts_count_by_the_batch_in_the_backward(size, loop):
    cases = [(33, {}), (35, {"change": torch.clone}), (43, {"times": 2}), (43, {})]
    if loop is not left_out:  # on a rank whose parts are of one size, it looks like ahead
        cases += [(37, {}), (39, {})]
    for samples, options in cases:
        expected = loop(samples, **options)
        with parwrap.distributed(batch="global"):
            actual = loop(samples, **options)

        assert expected == pytest.approx(actual, abs=1e-12), (samples, options)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("loop", [one_ahead, several_ahead])
def test_tokens_counted_over_ranks_do_so_too(loop, monkeypatch):
    expected = loop(37)

    def criterion(output, target):
        return parwrap.mean_over_ranks(nn.functional.mse_loss(output, target, reduction="sum"), target.numel())

    monkeypatch.setattr(Trained.__init__, "__defaults__", (criterion,))
    with parwrap.distributed(batch="global"):
        assert expected == pytest.approx(loop(37), abs=1e-12)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("loop", [one_ahead, several_ahead])
def test_joined_parts_do_so_too(loop):
    expected = loop(37)
    with parwrap.distributed(uneven="join"):
        assert expected == pytest.approx(halved(loop, 37), abs=1e-12)


def halved(loop, samples):
    """The loop with batches of half the size, which two ranks join."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "DataLoader", lambda dataset, batch_size: torch.utils.data.DataLoader(dataset, batch_size // 2))
        return loop(samples)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_other_strategies_weigh_alike(strategy):
    expected = one_ahead(37)
    with parwrap.distributed(batch="global", strategy=strategy):
        trained = one_ahead(37)

    assert expected == pytest.approx(trained, abs=1e-12)


@pytest.mark.ranks(2)
def test_windows_of_batches_weigh_alike():
    expected = parwrap.accumulate(2)(one_ahead)(37)
    with parwrap.distributed(batch="global"):
        assert expected == pytest.approx(parwrap.accumulate(2)(one_ahead)(37), abs=1e-12)


def in_pairs(samples):
    """One loss over two batches at a time, which may be of different sizes."""
    trained = Trained()
    batches = iter(DataLoader(numbers(samples), batch_size=8))
    for (x, y), (u, v) in zip(batches, batches, strict=False):
        trained.optimizer.zero_grad()
        (trained.criterion(trained.model(x), y) + trained.criterion(trained.model(u), v)).backward()
        trained.optimizer.step()
    return trained.weights


@pytest.mark.ranks(2)
def test_one_loss_over_batches_that_count_differently_is_said():
    with (
        parwrap.distributed(batch="global"),
        pytest.warns(UserWarning, match=r"test_batches_drawn_ahead.py:\d+ belongs to: it may cover several batches"),
    ):
        in_pairs(29)


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_one_loss_over_batches_that_count_alike_is_exact():
    expected = in_pairs(32)
    with parwrap.distributed(batch="global"):
        assert expected == pytest.approx(in_pairs(32), abs=1e-12)
