"""What a backward reaches, and rule 5: the mean over ranks, written into the loss."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from parwrap.loop.losses import Losses, leading_sizes, reached, reenters, sparsely_used


def ids(tensors):
    return [id(tensor) for tensor in tensors]


def test_leaves_are_reached_in_the_order_of_the_forward_pass():
    first, second = nn.Linear(2, 3), nn.Linear(3, 1)
    loss = second(first(torch.ones(4, 2))).sum()

    assert set(ids([*first.parameters(), *second.parameters()])) == set(ids(reached([loss])))
    assert id(first.weight) == ids(reached([first.weight.sum()]))[0]
    assert [] == reached([torch.ones(1)])


def test_edges_are_roots_too():
    weight = nn.Parameter(torch.ones(2))
    edge = torch.autograd.graph.get_gradient_edge((weight * 2).sum())

    assert [id(weight)] == ids(reached([edge]))


def test_only_embeddings_use_a_weight_sparsely():
    embedding = nn.Embedding(5, 2, sparse=True)
    used = embedding(torch.tensor([1])).sum()

    assert {id(embedding.weight)} == sparsely_used([used])
    assert set() == sparsely_used([used + embedding.weight.sum()])
    assert set() == sparsely_used([nn.Embedding(5, 2)(torch.tensor([1])).sum()])


@pytest.mark.parametrize(("reentrant", "expected"), [(True, True), (False, False)])
def test_reentrant_checkpoints_are_seen(reentrant, expected):
    layer, x = nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)

    assert expected == reenters([checkpoint(layer, x, use_reentrant=reentrant).sum()])


def test_the_number_of_samples_is_among_the_first_sizes():
    model = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 1))
    sizes = leading_sizes([nn.functional.mse_loss(model(torch.ones(3, 2)), torch.ones(3, 1))])

    assert 3 in sizes
    assert 2 not in sizes


# rule 5


class Named(torch.Tensor):
    """A tensor of a library, such as MONAI's ``MetaTensor``: torch makes the results of its operations views."""


def scope(change):
    """The loss of each rank, and the scalar after the backward that ``change`` runs on it."""
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for (x,) in DataLoader(TensorDataset(torch.tensor([[1.0], [3.0]])), batch_size=1):
        loss = model(x).sum()
        before = loss.item()
        after = change(loss, model, optimizer)
    return before, after


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("plain", 2.0),
        ("double", 2.0),
        ("quotient", 2.0),
        ("quotient of a quotient", 2.0),
        ("subclass", 2.0),
        ("quotient of a subclass", 2.0),
        ("subclass of a view", None),
        ("quotient by zero", None),
        ("quotient that is a part", None),
        ("function", 2.0),
        ("retained", None),
        ("view", None),
        ("gradient given", None),
        ("two roots", None),
        ("no_sync", None),
    ],
)
def test_the_scalar_that_backward_was_called_on_is_the_mean_over_ranks(kind, expected):
    def change(loss, model, optimizer):
        if kind == "plain":
            loss.backward()
        elif kind == "double":
            loss = loss.double()
            loss.backward()
        elif kind == "quotient":
            (loss / 4).backward()
        elif kind == "quotient of a quotient":
            (loss / 4 / 3).backward()
        elif kind == "subclass":
            loss = loss.as_subclass(Named) * 1
            loss.backward()
        elif kind == "quotient of a subclass":
            loss = loss.as_subclass(Named) * 1
            (loss / 4).backward()
        elif kind == "subclass of a view":
            loss = torch.stack([loss, loss]).as_subclass(Named)[0]
            loss.backward()
        elif kind == "quotient by zero":
            (loss / 0).backward()
        elif kind == "quotient that is a part":
            (loss / 4 + 1).backward()
        elif kind == "function":
            torch.autograd.backward(loss)
        elif kind == "retained":
            loss.backward(retain_graph=True)
        elif kind == "view":
            loss = torch.stack([loss, loss])[0]
            loss.backward()
        elif kind == "gradient given":
            loss.backward(torch.tensor(2.0))
        elif kind == "two roots":
            torch.autograd.backward([loss, (loss * 2)])
        else:
            with parwrap.no_sync():
                loss.backward()
            model(torch.ones(1, 1)).sum().backward()
        return loss.item()

    with parwrap.distributed():
        before, after = scope(change)

        assert [1.0, 3.0] == parwrap.gather(before)
        assert (expected if expected is not None else before) == after


@pytest.mark.ranks(2)
def test_a_quotient_of_the_loss_gets_the_mean_of_quotients():
    def change(loss, model, optimizer):
        quotient = loss / 4
        quotient.backward()
        return quotient.item()

    with parwrap.distributed():
        assert 0.5 == scope(change)[1]


@pytest.mark.ranks(2)
def test_a_loss_that_a_scaler_has_multiplied_gets_the_mean_too():
    def change(loss, model, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        part = loss / 2
        scaled = scaler.scale(part)
        scaled.backward()
        return loss.item(), part.item(), scaled.item()

    with parwrap.distributed():
        assert (2.0, 1.0, 8.0) == scope(change)[1]


def test_a_divided_loss_keeps_nothing_alive():
    losses = Losses()
    quotient = torch.ones((), requires_grad=True).square() / 2
    losses.divided(quotient, 2, quotient / 2)

    assert not losses._origins


@pytest.mark.ranks(2)
@pytest.mark.parametrize("at_once", [False, True])
def test_so_does_each_of_several_that_it_has_multiplied(at_once):
    def change(loss, model, optimizer):
        scaler, losses = torch.amp.GradScaler("cpu", init_scale=8.0), [loss, loss * 2]
        scaled = scaler.scale(losses) if at_once else [scaler.scale(each) for each in losses]
        for each, graph in zip(scaled[::-1], (True, False), strict=True):
            each.backward(retain_graph=graph)
        return loss.item()

    with parwrap.distributed():
        assert 2.0 == scope(change)[1]


@pytest.mark.ranks(2)
def test_float64_losses_keep_their_digits():
    def change(loss, model, optimizer):
        precise = loss.double() + 1e-12 * (1 + parwrap.rank())
        precise.backward()
        return precise.item()

    with parwrap.distributed():
        assert 2 + 1.5e-12 == pytest.approx(scope(change)[1], abs=1e-14)


@pytest.mark.ranks(2)
def test_decisions_on_the_loss_agree():
    with parwrap.distributed():
        model = nn.Linear(1, 1)
        optimizer, steps = torch.optim.SGD(model.parameters(), lr=0.2), 0
        loader = DataLoader(TensorDataset(torch.randn(32, 1)), batch_size=4, shuffle=True)
        while steps < 100:
            for (x,) in loader:
                loss = nn.functional.mse_loss(model(x), 3 * x)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                steps += 1
                if loss < 0.1:
                    break
            if loss < 0.1:
                break

        assert 1 == len(set(parwrap.gather((steps, loss.item()))))
