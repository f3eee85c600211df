"""A loop that accumulates by hand, and the reference to compare it with."""

import itertools

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from parwrap.group.group import alone
from parwrap.strategies.ddp.gradient_averager import GradientAverager

EPOCHS, BATCHES = 6, 10


def watched(monkeypatch):
    """The epochs and batches whose backwards were averaged."""
    numbers, run = [], GradientAverager.run
    monkeypatch.setattr(GradientAverager, "run", lambda self, *args: (numbers.append((now.epoch, now.batch)), run(self, *args))[1])
    return numbers


class now:
    epoch = batch = 0


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def batches(loader=True, samples=12 * BATCHES):
    features = torch.randn(samples, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    data = TensorDataset(features, features[:, :1] * 2)
    reader = DataLoader(data, batch_size=12)
    return reader if loader else [data[begin : begin + 12] for begin in range(0, samples, 12)]


def numbered(reader):
    now.epoch += 1
    for now.batch, batch in enumerate(reader):
        yield now.batch, batch


def by_itself(function, *args, **kwargs):
    with alone():
        return function(*args, **kwargs)


def automatic(function, *args, batch="global", options=None, **kwargs):
    return parwrap.distributed(batch=batch, **(options or {}))(parwrap.accumulate("auto")(function))(*args, **kwargs)


def assert_same(expected, actual, tolerance=1e-12):
    for p, q in zip(expected.parameters(), actual.parameters(), strict=True):
        assert (p - q).abs().max() < tolerance


def sends_of(sent):
    """What was sent, by epoch."""
    return [[batch for _, batch in several] for _, several in itertools.groupby(sent, key=lambda each: each[0])]
