"""A model to train, and what its loop reads."""

from __future__ import annotations

import torch
from torch import nn

import parwrap


class Training:
    """A model and its optimizer, so that passes train."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def step(self, batch=None) -> None:
        self.optimizer.zero_grad()
        x = torch.tensor([[1.0], [2.0]]) if batch is None else torch.as_tensor(batch).float().reshape(-1, 1)
        self.model(torch.cat([x, x + 1])).square().mean().backward()
        self.optimizer.step()

    def train(self, loader) -> list:
        """Train on a pass over ``loader``. Returns the samples that it has read."""
        seen = []
        for batch in loader:
            self.step()
            seen += samples(batch)
        return seen


class HeldInCycle:
    """Holds an iterator of ``loader`` in a cycle, so that only the garbage collector finds it."""

    def __init__(self, loader) -> None:
        self.me, self.batches = self, iter(loader)


def samples(batch) -> list:
    """The numbers in ``batch``."""
    while isinstance(batch, (list, tuple)) and len(batch) == 1:
        batch = batch[0]
    return torch.as_tensor(batch).reshape(-1).tolist()


def read(loader) -> list:
    """The samples of a pass."""
    return [sample for batch in loader for sample in samples(batch)]


def everyones(seen) -> list:
    """What all ranks have seen, sorted."""
    return sorted(sample for each in parwrap.gather(seen) for sample in each)
