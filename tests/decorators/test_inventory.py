"""What a function can reach when its scope opens."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from parwrap.decorators.inventory import MOST, reachable
from parwrap.decorators.scope import Call


class Trainer:
    def __init__(self, held):
        self.held = held

    def train(self):
        pass


class Unlisted(list):
    """A list that nobody looks into."""

    def __iter__(self):
        raise AssertionError


def optimizer():
    return SGD([torch.ones(1)])


def put_into(held):
    """``held`` in each place where a function finds it."""

    def of_closure():
        return held

    return {
        "argument": Call(print, (held,)),
        "keyword": Call(print, (), {"optimizer": held}),
        "list": Call(print, ([held],)),
        "object": Call(print, (Trainer(held),)),
        "list of an object": Call(print, (Trainer([held]),)),
        "self": Call(Trainer(held).train),
        "closure": Call(of_closure),
        "helper": Call(lambda: of_closure()),
        "partial": Call(partial(print, held)),
    }


@pytest.mark.parametrize("place", put_into(None))
def test_a_function_reaches(place):
    sgd = optimizer()

    assert [sgd] == reachable(Optimizer, put_into(sgd)[place])


def test_a_block_reaches_the_variables_around_it():
    sgd = optimizer()

    assert [sgd] == reachable(Optimizer, Call())


def test_several_kinds_are_found_in_one_walk():
    sgd, model = optimizer(), nn.Linear(1, 1)

    assert [model, sgd] == reachable((nn.Module, Optimizer), Call(print, (model, [sgd])))


def test_data_is_not_looked_into():
    sgd = optimizer()
    tokens, names = Unlisted([sgd] * (MOST + 1)), dict.fromkeys(range(MOST + 1), sgd)

    assert [] == reachable(Optimizer, Call(print, (tokens, Trainer(tokens), names, {"data": tokens})))
    assert [sgd] == reachable(Optimizer, Call(print, ([sgd] * MOST,)))
