"""Decorators on one function have the same effect in any order."""

import io
from contextlib import redirect_stderr
from functools import reduce
from itertools import permutations

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset

import parwrap


def train():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = torch.randn(12, 4)
    for inputs, targets in DataLoader(TensorDataset(samples, samples[:, :1]), batch_size=4, shuffle=True):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs).float(), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return torch.cat([value.detach().flatten() for value in model.state_dict().values()]).tolist()


@pytest.mark.ranks(2)
def test_every_order_of_the_four_decorators_gives_the_same_weights():
    decorators = [parwrap.distributed(batch="global"), parwrap.amp(dtype="bf16"), parwrap.sync_bn, parwrap.accumulate(2)]
    weights = [reduce(lambda function, decorator: decorator(function), order, train)() for order in permutations(decorators)]

    assert 24 == len(weights)
    assert [weights[0]] * 24 == weights
    assert weights[0] == parwrap.broadcast(weights[0])
    assert weights[0] != parwrap.distributed(batch="global")(train)()


def clipped():
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for x in ([9.0, 0.0], [0.0, 1.0]):
        optimizer.zero_grad()
        (weight * torch.tensor(x)).sum().backward()
        clip_grad_norm_([weight], 1.0)
        optimizer.step()
    return weight


def test_a_block_acts_on_imported_names_as_a_decorator_does():
    mean = torch.tensor([4.5, 0.5])
    with parwrap.accumulate(2):
        in_block = clipped()

    assert torch.allclose(-mean / mean.norm(), in_block)
    assert torch.equal(in_block, parwrap.accumulate(2)(clipped)())


@pytest.mark.ranks(2)
def test_the_line_at_the_start_of_training_tells_what_is_on():
    with redirect_stderr(io.StringIO()) as said:
        parwrap.distributed(batch="global")(parwrap.accumulate(2)(parwrap.amp(dtype="bf16")(parwrap.sync_bn(train))))()

    assert (parwrap.rank() == 0) == (", sync_bn, amp bfloat16, accumulate(2), seed " in said.getvalue())
