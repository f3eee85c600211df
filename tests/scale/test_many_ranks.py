"""What one rank sends does not grow with the number of ranks: the start, an agreement, steps, an evaluation and the end."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from counted_group import one_of, sent
from parwrap.ranks.agreement import agree

FEW, MANY = 8, 8192
STEPS = 6


def train(size, noted=lambda step: None):
    """Batches of one sample for every rank, an evaluation, and a model with buffers."""
    data = TensorDataset(torch.ones(STEPS * size, 3), torch.ones(STEPS * size, 1))
    held_out = DataLoader(TensorDataset(torch.ones(8, 3)), 4)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1), nn.BatchNorm1d(1)).train()
    model[1].momentum = model[3].momentum = 0.0
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step, (x, y) in enumerate(DataLoader(data, 1), 1):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x.expand(2, 3) * torch.arange(1, 3).view(2, 1)), y.expand(2, 1)).backward()
        optimizer.step()
        noted(step)
    model.eval()
    with torch.no_grad():
        for (x,) in held_out:
            model(x)


def never(details):
    raise AssertionError("ranks that agree send no details")


def counts(size, run):
    """What rank 0 of ``size`` sends in ``run``."""
    random.seed(0)  # a scope sends the state of Python's random numbers, whose length depends on it
    with one_of(size) as group:
        run(group)
        return dict(sent)


@pytest.fixture(autouse=True)
def private(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.mark.parametrize(
    "run",
    [
        lambda group: None,
        lambda group: agree(group, "a set", 7, lambda: never(None), never),
        lambda group: parwrap.barrier(),
        lambda group: parwrap.reduce_mean(torch.ones(3)),
        lambda group: parwrap.distributed(lambda: None)(),
    ],
    ids=["the start", "an agreement", "a barrier", "a reduced number", "an empty function"],
)
def test_a_rank_of_many_sends_what_a_rank_of_few_does(run):
    assert counts(FEW, run) == counts(MANY, run)


def test_so_it_does_in_a_training():
    few, many = (counts(size, lambda group, size=size: parwrap.distributed(train)(size)) for size in (FEW, MANY))

    assert few == many
    assert few["all-reduce: calls"] > STEPS


def test_a_regular_step_sends_one_message_with_the_gradients_and_a_few_numbers():
    """Also at that step weights are not checked, so all that is sent is DDP's bucket."""

    def run(group):
        before = {}

        def noted(step):
            before[step] = dict(sent)

        parwrap.distributed(train)(MANY, noted)
        steps.append({kind: count - before[5][kind] for kind, count in before[6].items() if count != before[5][kind]})

    steps: list[dict[str, int]] = []
    counts(MANY, run)
    parameters, numbers = (3 * 4 + 4) + 8 + (4 + 1) + 2, 18
    tensors = 8

    assert [{"all-reduce: calls": 1, "all-reduce: bytes": 4 * (parameters + tensors + numbers)}] == steps


@pytest.mark.parametrize(
    "features", [4, 400, 600], ids=["smaller than DDP's first bucket", "with the first layer larger", "with the first layer much larger"]
)
def test_a_step_of_a_model_sends_as_many_messages_as_ddp_by_hand(features):
    def train(wrapped, calls):
        model = nn.Sequential(nn.Linear(700, features), nn.Linear(features, 2))
        forward = wrapped(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(STEPS):
            forward(torch.ones(2, 700)).sum().backward()
            before = sent["all-reduce: calls"]
            optimizer.zero_grad()
            forward(torch.ones(2, 700)).sum().backward()
            calls.append(sent["all-reduce: calls"] - before)

    by_hand, of_parwrap = [], []
    counts(FEW, lambda group: train(nn.parallel.DistributedDataParallel, by_hand))
    counts(FEW, lambda group: parwrap.distributed(train)(lambda model: model, of_parwrap))

    assert by_hand[-1] == of_parwrap[-1] == 1
