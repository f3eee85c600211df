"""What one pass has drawn, and what has trained on it."""

from __future__ import annotations

import pickle
from collections import deque

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from parwrap.decorators.distributed import open_loop
from parwrap.loop.one_pass import Batch, Pass
from parwrap.places import Place


@pytest.mark.parametrize(
    ("loop", "untrained", "ahead", "depth"),
    [
        ("", 0, False, 0),
        ("db db db", 0, False, 0),
        ("dbb db", 0, False, 0),  # two losses of one batch
        ("d db db d", 2, True, 1),  # reads one batch ahead
        ("d d db db db", 2, True, 2),
        ("db d db", 1, True, 0),  # skips a batch
        ("bdb", 0, False, -1),  # a backward while its first batch is read
    ],
)
def test_batches_that_are_drawn_ahead_are_those_without_a_backward(loop, untrained, ahead, depth):
    one = Pass(True, True, Place("train.py", 3), weights=deque([Batch(0, 1.0)] * 9))
    backwards = 5  # of other passes
    for each in loop.replace(" ", ""):
        if each == "d":
            one.drew(2, backwards)
        else:
            one.ran_backward(backwards)
            backwards += 1

    assert (untrained, ahead, depth) == (one.in_flight.untrained, one.in_flight.ahead, one.in_flight.depth)
    assert (loop.count("b"), 2 * loop.count("d")) == (one.backwards, one.samples)


def plain(opened):
    """The data of a pass, without its handles."""
    return {**vars(opened), "loader": None, "weights": None, "counting": None}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{}, {"batch": "global"}], ids=str)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_pass_in_its_midst_is_plain_data_that_pickles(options, workers):
    with parwrap.distributed(**options):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(torch.arange(18.0).reshape(-1, 1)), batch_size=4, num_workers=workers)
        batches = iter(loader)
        for _ in range(2):
            model(next(batches)[0]).square().mean().backward()
            optimizer.step()
        (opened,) = open_loop().passes.open

        again = pickle.loads(pickle.dumps(opened))

    assert (2, 2, 2) == (again.drawn, again.backwards, again.steps.count)
    assert (4 if options else 8) == again.samples
    assert plain(opened) == vars(again)


def test_a_pass_that_was_pickled_goes_on_as_the_pass_itself():
    one = Pass(True, True, Place("train.py", 3), weights=deque([Batch(2, 1.0), Batch(2, 0.5), Batch(2, 0.5)]))
    one.drew(2, 0)
    again = pickle.loads(pickle.dumps(one))
    again.weights = deque(one.weights)
    for each in (one, again):
        each.drew(2, 0)
        each.ran_backward(0)
        each.drew(2, 1)

    assert plain(one) == plain(again)
    assert [Batch(2, 1.0), Batch(2, 0.5), Batch(2, 0.5)] == list(again.in_flight.batches)
