"""Losses of the user's own on outputs in pieces, through the decorator."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import parwrap


class Focal(nn.Module):
    def __init__(self, reduce=torch.mean):
        super().__init__()
        self.reduce, self.rows = reduce, []

    def forward(self, logits, target):
        self.rows.append(len(target))
        chances = logits.softmax(1)[range(len(target)), target]
        return self.reduce((1 - chances) * chances.log())


class Contrastive(Focal):
    def forward(self, logits, target):
        self.rows.append(len(target))
        return F.cross_entropy(logits @ logits.T, torch.arange(len(logits)))


class Weighted(Focal):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, logits, target):
        return super().forward(logits, target) * self.weight


class WeightedLoss(Weighted):
    pass


def losses(criterion, steps=5, **options):
    """The losses of a few steps, and the gradients of the last."""
    torch.manual_seed(0)
    model, found = nn.Linear(4, 3), []
    parameters = [*model.parameters(), *criterion.parameters()]
    with parwrap.data_parallel(**options):
        for _ in range(steps):
            for p in parameters:
                p.grad = None
            loss = criterion(model(torch.randn(7, 4)), torch.randint(3, (7,)))
            loss.backward()
            found.append(loss.detach())
    return [*found, *(p.grad for p in parameters)]


def same(criterion):
    other = copy.deepcopy(criterion)
    expected, actual = losses(criterion), losses(other, device_ids=["cpu"] * 2, gather=False)
    criterion.rows[:] = other.rows
    return all(torch.allclose(*pair, atol=1e-6) for pair in zip(expected, actual, strict=True))


@pytest.mark.parametrize("criterion", [Focal(), Focal(torch.sum), WeightedLoss()])
def test_means_and_sums_run_on_the_pieces_and_ever_more_rarely_on_the_whole_too(criterion):
    assert same(criterion)
    assert [7, 7, 4, 7, 4] == criterion.rows  # what a copy notes is gone


def test_what_is_neither_is_computed_on_the_whole_and_said_once():
    criterion = Contrastive()
    with pytest.warns(UserWarning, match="parwrap: Contrastive is neither a mean nor a sum over the samples, so it is comput") as said:
        assert same(criterion)

    assert 1 == len(said)
    assert [7] * 5 == criterion.rows


def test_a_loss_of_zero_tells_nothing():
    class Hinge(nn.Module):
        def forward(self, outputs, target):
            return (outputs - target).relu().sum()

    model, hinge, target = nn.Linear(2, 2), Hinge(), torch.zeros(7, 2)
    batches = [torch.full((7, 2), value) for value in (0.0, 1.0, 2.0, 3.0)]
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    with parwrap.data_parallel(device_ids=["cpu"] * 2, gather=False):
        found = [hinge(model(x), target).item() for x in batches]

    assert [0, 28, 56, 84] == found


def test_targets_that_do_not_fit_are_as_for_the_whole():
    class Pairs(nn.Module):
        def forward(self, logits, target):
            return logits.sum() + target.sum()

    model, x = nn.Linear(2, 2), torch.ones(6, 2)
    with parwrap.data_parallel(device_ids=["cpu"] * 2, gather=False), warnings.catch_warnings(action="error"):
        assert torch.allclose(model(x).sum() + 4, Pairs()(model(x), torch.ones(4)))
