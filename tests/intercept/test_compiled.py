"""Steps that went through ``torch.compile``: as without it, and as quiet as alone."""

from __future__ import annotations

import functools
import logging
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import parwrap

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
Y = (X.sum(1) > 0).long()
compiled = functools.partial(torch.compile, backend="eager")


def backward(model, optimizer, x, y):
    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    return loss


def whole(model, optimizer, x, y):
    optimizer.zero_grad()
    with torch.autocast("cpu", enabled=False):
        loss = functional.cross_entropy(model(x), y)
    torch.autograd.backward(loss)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss


def train(step, steps=False, batch=4):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = []
    for x, y in DataLoader(TensorDataset(X, Y), batch, shuffle=True):
        losses.append(step(model, optimizer, x, y).detach())
        if not steps:
            optimizer.step()
            optimizer.zero_grad()
    return [*losses, *(p.detach() for p in model.parameters())]


@pytest.mark.ranks(2, fresh=True)  # torch changes classes for good when it compiles
@pytest.mark.parametrize("step", [backward, whole])
def test_a_compiled_step_with_its_backward_is_that_of_the_plain_one(step, recwarn, caplog):
    expected = parwrap.distributed(train)(step, step is whole)
    torch.testing.assert_close(parwrap.distributed(train)(compiled(step), step is whole), expected, rtol=0, atol=1e-6)

    assert not [each for each in recwarn if "Dynamo" in str(each.message)]
    assert not [each for each in caplog.records if "parwrap" in each.getMessage()]


def epoch(model, optimizer, loader):
    losses = []
    for x, y in loader:
        losses.append(whole(model, optimizer, x, y).detach())
    assert len(losses) == len(loader)
    return losses


def train_epoch(run):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    losses = run(model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(TensorDataset(X, Y), 4, shuffle=True))
    return [*losses, *(p.detach() for p in model.parameters())]


@pytest.mark.ranks(2, fresh=True)
def test_frames_of_parwrap_are_not_compiled(caplog):
    expected = parwrap.distributed(train_epoch)(epoch)
    assert len(expected) == 3 + 2
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*Dynamo does not know")
        torch.testing.assert_close(parwrap.distributed(train_epoch)(compiled(epoch)), expected, rtol=0, atol=1e-6)

    assert "parwrap" not in caplog.text


def steps_compiled(graphs):
    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.step = torch.compile(optimizer.step, backend=backend)
    for x, y in DataLoader(TensorDataset(X, Y), 2):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return len(parwrap.reduce_mean(model.weight))


@pytest.mark.ranks(2, fresh=True)
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_compiled_optimizer_is_compiled_once(accumulate, caplog):
    caplog.set_level(logging.WARNING)
    graphs = []
    function = parwrap.accumulate(3)(steps_compiled) if accumulate else steps_compiled
    parwrap.distributed(function)(graphs)
    assert 1 <= len(graphs) <= 3  # with and without the state of the first step
    assert "recompile" not in caplog.text


def frames_of_steps(kind):
    """How many frames torch compiles for a compiled step, and the number of graphs in them."""
    graphs = []
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    optimizer = kind(model.parameters(), 0.1)
    step = torch.compile(optimizer.step, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    for _ in range(9):  # weights are compared after the 1st, 2nd, 3rd, 4th and 8th
        model(X[:2]).sum().backward()
        step()
        optimizer.zero_grad()
    return torch._dynamo.utils.counters["frames"]["total"], len(graphs)


@pytest.mark.ranks(2, fresh=True)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_compiled_optimizer_has_no_more_frames_and_graphs_than_in_one_process(kind):
    frames, graphs = frames_of_steps(kind)
    found, as_many = parwrap.distributed(frames_of_steps)(kind)
    assert found <= frames
    assert as_many == graphs


def weighted(loss, model=nn.Linear):
    torch.manual_seed(0)
    model = model(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in DataLoader(TensorDataset(X, Y), 6):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    return model.weight.detach()


@pytest.mark.ranks(2, fresh=True)
def test_a_compiled_loss_of_a_global_batch_is_the_mean_of_the_whole_batch():
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0]))
    found = parwrap.distributed(batch="global")(weighted)(torch.compile(loss, backend="aot_eager"))
    torch.testing.assert_close(found, weighted(loss), rtol=0, atol=1e-6)


@pytest.mark.ranks(2, fresh=True)
def test_a_graph_that_must_be_whole_is_an_error_that_says_why():
    with pytest.raises(torch._dynamo.exc.Unsupported, match="compile without fullgraph=True"):
        parwrap.distributed(batch="global")(weighted)(compiled(nn.CrossEntropyLoss(), fullgraph=True))
