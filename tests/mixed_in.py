"""Classes with a mixin."""

import torch


class Base:
    """A trainer by somebody who never heard of parwrap."""

    def __init__(self):
        self.calls = []

    def train(self, x=1):
        self.calls.append("Base.train")
        return open_group()

    def evaluate(self):
        return open_group()


def open_group():
    """Whether calls that train are intercepted, as inside the decorators."""
    return hasattr(torch.autograd.backward, "__wrapped__")


def first_of(seed):
    return torch.rand(1, generator=torch.Generator().manual_seed(seed)).item()
