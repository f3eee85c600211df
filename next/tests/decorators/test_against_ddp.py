"""``batch="per_rank"`` is bit for bit hand-written DDP with ``DistributedSampler(seed)``."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import parwrap


def dataset(samples=48):
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(samples, 6, generator=generator), torch.randint(3, (samples,), generator=generator))


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.ranks(2)
def test_a_plain_loop_gives_the_weights_of_ddp():
    model, data = mlp(), dataset()
    by_hand = DistributedDataParallel(copy.deepcopy(model))

    @parwrap.distributed
    def train():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loader = DataLoader(data, batch_size=4, shuffle=True)
        losses = []
        for _ in range(3):
            for x, y in loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return losses

    seed = torch.initial_seed()
    losses = train()
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1, momentum=0.9)
    sampler = DistributedSampler(data, seed=seed)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(by_hand(x), y)
            loss.backward()
            optimizer.step()

    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), by_hand.module.parameters(), strict=True))
    assert 18 == len(losses)
