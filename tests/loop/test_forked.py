"""A process that a rank forks is no rank: it trains by itself, and ends by itself."""

from __future__ import annotations

import multiprocessing
import os

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import parwrap


def fold(number):
    """Train a model of its own on a loader of its own. Returns what it has read, its weight, and what it gathers."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for x in DataLoader(torch.arange(4.0)[:, None] + number, batch_size=1):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        seen.append(x.item())
    return seen, round(model.weight.item(), 4), parwrap.gather(number)


@pytest.mark.ranks(2)
def test_folds_in_a_pool_train_as_in_one_process():
    expected = [([0.0, 1.0, 2.0, 3.0], 0.4, [0]), ([1.0, 2.0, 3.0, 4.0], 0.0, [1])]
    with parwrap.distributed():
        with multiprocessing.get_context("fork").Pool(2) as pool:
            folds = pool.map(fold, range(2))
        together = fold(0)

    for (seen, weight, gathered), (all_seen, all_weight, all_gathered) in zip(folds, expected, strict=True):
        assert (all_seen, all_weight, all_gathered) == (seen, pytest.approx(weight), gathered)
    assert (2, [0, 0]) == (len(together[0]), together[2])


@pytest.mark.ranks(2)
def test_a_forked_process_that_leaves_the_scope_sends_nothing():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    forked = 0
    try:
        with parwrap.distributed():
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            forked = os.fork()
            if not forked:
                raise SystemExit(3)
            status = os.waitpid(forked, 0)[1]
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
    except SystemExit:
        os._exit(3)

    assert 3 == os.waitstatus_to_exitcode(status)
