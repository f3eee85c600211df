"""Loops to accumulate, and their results in one process."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parwrap

SIZES = [pytest.param(size, marks=pytest.mark.ranks(size)) for size in (1, 2, 3)]


def dataset(samples=72):
    features = torch.randn(samples, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return TensorDataset(features, features[:, :1] * 2)


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def train(batch_size, epochs=3, clip=None, to_none=True, samples=72, leave=lambda epoch, i: False):
    """A plain loop."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loader = DataLoader(dataset(samples), batch_size=batch_size)
    lengths = []
    for epoch in range(epochs):
        lengths.append(len(loader))
        for i, (x, y) in enumerate(loader):
            optimizer.zero_grad(set_to_none=to_none)
            nn.functional.mse_loss(model(x), y).backward()
            if clip:
                clip(model)
            optimizer.step()
            if leave(epoch, i):
                break
        schedule.step()
    return model, lengths


def batch_of(rank, number):
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * rank + number), dtype=torch.float64)


def weight():
    return nn.Parameter(torch.linspace(1, 2, 4, dtype=torch.float64))


def loss_of(w, x):
    return (((x @ w).tanh() - 0.5) ** 2).mean()


def stepped(steps):
    """The weight after steps that each take the mean gradient of some batches, given by rank and number."""
    w = weight()
    for batches in steps:
        gradients = [torch.autograd.grad(loss_of(w, batch_of(*each)), w)[0] for each in batches]
        w = nn.Parameter(w.detach() - 0.5 * sum(gradients) / len(gradients))
    return w


def train_by_rank(numbers, to_zero=lambda optimizer: optimizer.zero_grad(), loader=True, left=None):
    """A loop over this rank's batches of those numbers, which is left after as many as ``left``."""
    w = weight()
    optimizer = torch.optim.SGD([w], lr=0.5)
    for number in parwrap_loader(numbers) if loader else numbers:
        to_zero(optimizer)
        loss_of(w, batch_of(parwrap.rank(), int(number))).backward()
        optimizer.step()
        if number + 1 == left:
            break
    return w


def parwrap_loader(numbers):
    """A loader that gives every rank all of ``numbers``."""
    return parwrap.replicate(DataLoader(list(numbers), batch_size=None))


def accumulated_in(steps, function):
    return parwrap.accumulate(steps=steps)(function)
