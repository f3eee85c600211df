"""Losses with ``batch="global"`` that divide by weights of classes or by targets that count, against one process with whole batches."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import parwrap

CLASSES = 3
WEIGHT = torch.tensor([0.2, 1.0, 5.0], dtype=torch.float64)


def samples(count=27, tokens=0, ignored=None):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(CLASSES, (count, tokens) if tokens else (count,), generator=generator)
    if ignored is not None:
        y[torch.rand(y.shape, generator=generator) < 0.4] = ignored
    return TensorDataset(x, y)


def trained(criterion, dataset, tokens=0, ahead=False):
    """The weights after two epochs, and the last loss."""
    torch.manual_seed(0)
    model = nn.Linear(4, CLASSES * max(tokens, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        batches = iter(DataLoader(dataset, batch_size=8))
        following = next(batches, None)
        while following is not None:
            x, y = following
            following = next(batches, None) if ahead else None
            optimizer.zero_grad()
            logits = model(x)
            loss = criterion(logits.view(len(x), CLASSES, tokens) if tokens else logits, y)
            loss.backward()
            optimizer.step()
            following = following if ahead else next(batches, None)
    return [*torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(), loss.item()]


def composite(logits, target):
    """Two classification losses of different weights, and one that is a mean over samples."""
    first, second = functional.cross_entropy(logits, target, weight=WEIGHT), functional.cross_entropy(logits, target, WEIGHT.flip(0))
    return first + 0.3 * second + 0.1 * logits.square().mean()


CRITERIA = {
    "weighted": nn.CrossEntropyLoss(weight=WEIGHT),
    "log": lambda logits, target: nn.NLLLoss(weight=WEIGHT)(functional.log_softmax(logits, 1), target),
    "smoothed": nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1),
    "composite": composite,
    "ignored": nn.CrossEntropyLoss(ignore_index=2),
    "weighted and ignored": nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=1),
    "plain": nn.CrossEntropyLoss(),
    "probabilities": lambda logits, target: functional.cross_entropy(logits, functional.one_hot(target, CLASSES).double()),
    "sum": lambda logits, target: functional.cross_entropy(logits, target, reduction="none").mean(),
}


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", CRITERIA)
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_parts_count_by_what_they_are_divided_by(name):
    expected = trained(CRITERIA[name], samples())
    with parwrap.distributed(batch="global"):
        actual = trained(CRITERIA[name], samples())

    assert expected == pytest.approx(actual, abs=1e-6)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("tokens", [0, 1, 3])
@pytest.mark.parametrize("weight", [None, WEIGHT], ids=["alike", "weighted"])
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_ignored_targets_do_not_count(tokens, weight):
    criterion, dataset = nn.CrossEntropyLoss(weight), samples(tokens=tokens, ignored=-100)
    expected = trained(criterion, dataset, tokens)
    with parwrap.distributed(batch="global"):
        actual = trained(criterion, dataset, tokens)

    assert expected == pytest.approx(actual, abs=1e-6)


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_a_loop_that_draws_ahead_counts_alike():
    expected = trained(CRITERIA["weighted"], samples(), ahead=True)
    with parwrap.distributed(batch="global"):
        actual = trained(CRITERIA["weighted"], samples(), ahead=True)

    assert expected == pytest.approx(actual, abs=1e-6)


@pytest.mark.ranks(2)
def test_batches_of_each_rank_are_averaged_as_by_ddp():
    with parwrap.distributed():
        weights = trained(CRITERIA["weighted"], samples())

        assert 1 == len({tuple(each) for each in parwrap.gather(weights)})
        assert functional.cross_entropy.__module__ == "torch.nn.functional"
