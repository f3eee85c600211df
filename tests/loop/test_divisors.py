"""Losses with ``batch="global"`` that divide by weights of classes or by targets that count, against one process with whole batches."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
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


class Named(torch.Tensor):
    """For a subclass of tensors, torch calls a loss function twice."""


CRITERIA = {
    "subclass": lambda logits, target: functional.cross_entropy(logits.as_subclass(Named), target, weight=WEIGHT),
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


def steps_of(loss_of, dataset):
    """The weights and the last loss after a pass whose losses are ``loss_of(model, x, y)``."""
    torch.manual_seed(0)
    model = nn.Linear(4, CLASSES).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for x, y in DataLoader(dataset, batch_size=8):
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        if loss is not None:
            loss.backward()
            optimizer.step()
    return [*torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(), 0.0 if loss is None else loss.item()]


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_a_second_backward_through_a_loss_has_its_value_too():
    """Also together with a loss that the first backward has not reached."""

    def losses():
        torch.manual_seed(0)
        model = nn.Linear(4, CLASSES).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for x, y in DataLoader(samples(), batch_size=8):
            optimizer.zero_grad()
            first = functional.cross_entropy(model(x), y, WEIGHT)
            other = functional.cross_entropy(model(x), y, WEIGHT.flip(0))
            first.backward(retain_graph=True)
            second = 0.5 * first + model.weight.sum()
            second.backward(retain_graph=True)
            third = 2 * first + 0.3 * other
            third.backward()
            optimizer.step()
            yield third.item()
        yield from torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()

    expected = list(losses())
    with parwrap.distributed(batch="global"):
        actual = list(losses())

    assert expected == pytest.approx(actual, abs=1e-6)


def weighted_loss(model, x, y):
    return functional.cross_entropy(model(x), y, WEIGHT)


def saved_elsewhere(model, x, y):
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
        return weighted_loss(model, x, y)


def of_some_batches(model, x, y):
    """The second loss is computed and never differentiated."""
    model.batches = getattr(model, "batches", 0) + 1
    loss = weighted_loss(model, x, y)
    return None if model.batches == 2 else loss


def penalized(model, x, y):
    """Gradients of inner losses are this rank's, so ranks may take different numbers of them."""
    loss = weighted_loss(model, x, y)
    for _ in range(1 + parwrap.rank()):
        torch.autograd.grad(weighted_loss(model, x, y), model.bias)
    return loss


LOSSES = {"saved elsewhere": saved_elsewhere, "of some batches": of_some_batches, "with inner gradients": penalized}


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.usefixtures("nothing_is_warned_of")
def test_losses_count_where_a_backward_reaches_them(name):
    expected = steps_of(LOSSES[name], samples())
    with parwrap.distributed(batch="global"):
        actual = steps_of(LOSSES[name], samples())

    assert expected == pytest.approx(actual, abs=1e-6)


@pytest.mark.ranks(2, fresh=True)  # checkpoints note the kind of device for good
@pytest.mark.parametrize("reentrant", [False, True])
def test_losses_inside_of_checkpoints_count_alike(reentrant):
    def loss(model, x, y):
        return checkpoint(lambda x: 2 * weighted_loss(model, x, y), x.requires_grad_(), use_reentrant=reentrant)

    expected = steps_of(loss, samples())
    with parwrap.distributed(batch="global"):
        actual = steps_of(loss, samples())

    compared = slice(-1 if reentrant else None)  # a re-entrant checkpoint computes the value without a graph: the mean of the ranks' means
    assert expected[compared] == pytest.approx(actual[compared], abs=1e-6)


@pytest.mark.ranks(2)
def test_a_meta_learner_adapts_to_the_tasks_of_each_rank():
    """Second-order MAML: the loss of a task's support set is the inner problem's; the query's is a mean over all tasks."""

    def loss(model, x, y):
        inner = functional.cross_entropy(model(x), y % 2, WEIGHT)
        slope, bias = torch.autograd.grad(inner, (model.weight, model.bias), create_graph=True)
        return functional.linear(x, model.weight - 0.1 * slope, model.bias - 0.1 * bias).square().mean()

    with parwrap.distributed(batch="global"):
        actual = steps_of(loss, samples(16))
    torch.manual_seed(0)
    model = nn.Linear(4, CLASSES).double()
    for x, y in DataLoader(samples(16), batch_size=8):
        model.zero_grad()
        for part in (slice(4), slice(4, 8)):
            (0.5 * loss(model, x[part], y[part])).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.5 * p.grad

    assert torch.cat([p.detach().flatten() for p in model.parameters()]).tolist() == pytest.approx(actual[:-1], abs=1e-12)


@pytest.mark.ranks(2)
def test_a_rank_with_fewer_losses_is_an_error():
    """One mean a class that a part of the batch has: the parts have different classes."""

    def loss(model, x, y):
        return sum(functional.cross_entropy(model(x[y == k]), y[y == k]) for k in range(2 - parwrap.rank()))

    with (
        pytest.raises(
            parwrap.RankMismatchError,
            match=r"in the loss at test_\w+\.py:\d+: [12] on this rank, and 3 on all 2 ranks together\. .*reduction=\"sum\"",
        ),
        parwrap.distributed(batch="global"),
    ):
        steps_of(loss, samples())
