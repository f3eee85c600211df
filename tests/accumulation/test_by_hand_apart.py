"""Loops that accumulate by hand on ranks that take different paths."""

import pytest
import torch
from torch import nn

import parwrap
from loops_by_hand import BATCHES, EPOCHS, assert_same, automatic, batches, build, by_itself, numbered, sends_of, watched


@pytest.mark.ranks(2)
def test_a_layer_that_one_rank_uses_in_an_earlier_batch_of_a_window():
    def branches():
        torch.manual_seed(0)
        first, second = nn.Linear(6, 1).double(), nn.Linear(6, 1).double()
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
        for epoch in range(EPOCHS):
            for i, (x, y) in numbered(batches()):
                # after it was learned, the second layer has its first gradient on rank 1 alone
                used = second(x) if (epoch, i) == (4, 1) and x[0, 0] != features[0, 0] else 0
                nn.functional.mse_loss(first(x) + used, y).backward()
                if (i + 1) % 5 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        return nn.ModuleList([first, second])

    features = batches(loader=False)[1][0]
    expected = by_itself(branches_of_halves)
    assert_same(expected, automatic(branches))


def branches_of_halves():
    """The same by itself: the second half of that batch goes through the second layer too."""
    torch.manual_seed(0)
    first, second = nn.Linear(6, 1).double(), nn.Linear(6, 1).double()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    for epoch in range(EPOCHS):
        for i, (x, y) in numbered(batches()):
            predicted = first(x)
            if (epoch, i) == (4, 1):
                halves = torch.arange(len(x)).reshape(-1, 1) >= len(x) / 2
                predicted = predicted + halves * second(x)
            nn.functional.mse_loss(predicted, y).backward()
            if (i + 1) % 5 == 0:
                optimizer.step()
                optimizer.zero_grad()
    return nn.ModuleList([first, second])


@pytest.mark.ranks(2)
def test_ranks_that_step_at_different_places_average_each_backward(monkeypatch):
    sent = watched(monkeypatch)

    def apart():
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(EPOCHS):
            for i, (x, y) in numbered(batches()):
                nn.functional.mse_loss(model(x), y).backward()
                if (i + 1) % (5 if parwrap.rank() else 2) == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        return model

    automatic(apart)

    assert sends_of(sent) == [list(range(BATCHES))] * EPOCHS


@pytest.mark.ranks(3)
def test_a_rank_that_ends_first_gives_its_open_window():
    """Ranks 0 and 2 take the gradients of all batches that were read; rank 1 has ended in the middle of a window."""
    steps, left = 40, {0: 40, 1: 38, 2: 40}

    def gradient(w, rank, number):
        return w.detach() * 0 + rank + number

    def own():
        w = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = torch.optim.SGD([w], lr=0.01)
        for number in range(left[parwrap.rank()]):
            (w * (parwrap.rank() + number)).sum().backward()
            if (number + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
        return w

    actual = automatic(own)
    before = -0.01 * sum(rank + number for number in range(36) for rank in range(3)) / 3
    counted = [(rank, number) for number in range(36, steps) for rank in range(3) if number < left[rank]]
    window = sum(rank + number for rank, number in counted) / (len(counted) / 4)

    assert abs(actual.item() - (before - 0.01 * window)) < 1e-9
