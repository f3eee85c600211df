"""Ranks under ``@accumulate`` that leave first, or use other layers than the others."""

import warnings

import pytest
import torch
from torch import nn

import parwrap
from accumulated import accumulated_in, batch_of, loss_of, stepped, train_by_rank, weight
from parwrap.group.group import alone


@pytest.mark.ranks(3)
@pytest.mark.parametrize("loader", [True, False])
def test_a_rank_that_leaves_first_sends_its_open_window(loader):
    left = {0: 12, 1: 6, 2: 12}

    @parwrap.distributed
    def train():
        return train_until(range(12), loader=loader, left=left[parwrap.rank()])

    train_until = accumulated_in(4, train_by_rank)
    expected = stepped(
        [
            [(rank, number) for rank in range(3) for number in range(4)],
            [(rank, number) for rank in range(3) for number in range(4, min(8, left[rank]))],
            [(rank, number) for rank in (0, 2) for number in range(8, 12)],
        ]
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        actual = train()

    assert (actual - expected).abs().max() < 1e-12
    assert [parwrap.rank() == 0] == [any("it ran fewer batches" in str(each.message) for each in said)]


@pytest.mark.ranks(3)
def test_a_rank_that_leaves_before_its_first_average_changes_nothing_that_it_does_not_know():
    """It has never agreed with the others on a layer that no optimizer owns."""

    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))

    @parwrap.distributed
    @parwrap.accumulate(2)
    def train():
        model = build()
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
        for _ in range((1, 2, 5)[parwrap.rank()]):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    model = train()

    assert torch.equal(model[1].weight, build()[1].weight)


@pytest.mark.ranks(3)
def test_ranks_that_leave_in_different_windows():
    left = {0: 5, 1: 6, 2: 11}

    @parwrap.distributed
    def train():
        return accumulated_in(4, train_by_rank)(range(20), left=left[parwrap.rank()])

    expected = stepped(
        [
            [(rank, number) for rank in range(3) for number in range(4)],
            [(rank, number) for rank in range(3) for number in range(4, min(8, left[rank]))],
            [(2, number) for number in range(8, 11)],
        ]
    )

    assert (train() - expected).abs().max() < 1e-12


@pytest.mark.ranks(2)
def test_a_window_that_ends_with_the_data_of_its_rank_counts_as_much_as_the_others():
    @parwrap.distributed
    def train():
        return accumulated_in(4, train_by_rank)(range(4 - parwrap.rank()))

    counted = [(0, number) for number in range(4) for _ in range(3)] + [(1, number) for number in range(3) for _ in range(4)]

    assert (train() - stepped([counted])).abs().max() < 1e-12


@pytest.mark.ranks(2)
def test_a_layer_that_one_rank_uses_in_an_earlier_batch_of_a_window():
    uses = [(0, 6), (1, 6), (1, 7), (0, 8)]

    def losses(w, extra, rank, number):
        x = batch_of(rank, number)
        return loss_of(w * extra if (rank, number) in uses else w, x)

    @parwrap.distributed
    @parwrap.accumulate(steps=2)
    def train():
        w, extra = weight(), nn.Parameter(torch.full((4,), 0.5, dtype=torch.float64))
        optimizer = torch.optim.SGD([w, extra], lr=0.5)
        for number in range(12):
            optimizer.zero_grad()
            losses(w, extra, parwrap.rank(), number).backward()
            optimizer.step()
        return w, extra

    w, extra = weight(), nn.Parameter(torch.full((4,), 0.5, dtype=torch.float64))
    reference = torch.optim.SGD([w, extra], lr=0.5)
    for begin in range(0, 12, 2):
        reference.zero_grad()
        with alone():
            (sum(losses(w, extra, rank, number) for rank in (0, 1) for number in (begin, begin + 1)) / 4).backward()
        reference.step()
    actual = train()

    assert (actual[0] - w).abs().max() < 1e-12
    assert (actual[1] - extra).abs().max() < 1e-12
