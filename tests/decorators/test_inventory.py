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


class Slotted:
    __slots__ = ("held", "unset")

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
        "object with slots": Call(print, (Slotted(held),)),
        "self with slots": Call(Slotted(held).train),
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


of_module = optimizer()


def in_a_function():
    def step():
        return of_module

    return step()


def in_a_lambda():
    return (lambda: of_module)()


def in_a_generator():
    return next(each for _ in range(1) for each in [of_module])


def in_a_class():
    class Inner:
        def step(self):
            return of_module

    return Inner().step()


def beside_an_unset_variable():
    def calls():
        return of_module, later

    found = reachable(Optimizer, Call(calls))
    later = None
    return found


class Base:
    def step(self):
        return of_module


class Derived(Base):
    def train(self):
        self.step()


@pytest.mark.parametrize("function", [in_a_function, in_a_lambda, in_a_generator, in_a_class, Derived().train, lambda: Derived().train()])
def test_a_global_is_reached_from_code_inside_and_from_base_classes(function):
    assert [of_module] == reachable(Optimizer, Call(function))
    assert [of_module] == reachable(Optimizer, Call(Derived.train, (Derived(),)))
    assert [of_module] == beside_an_unset_variable()


def test_a_block_reaches_the_variables_around_it():
    sgd = optimizer()

    assert [sgd, of_module] == reachable(Optimizer, Call())


def test_several_kinds_are_found_in_one_walk():
    sgd, model = optimizer(), nn.Linear(1, 1)

    assert [model, sgd] == reachable((nn.Module, Optimizer), Call(print, (model, [sgd])))


def test_data_is_not_looked_into():
    sgd = optimizer()
    tokens, names = Unlisted([sgd] * (MOST + 1)), dict.fromkeys(range(MOST + 1), sgd)

    assert [] == reachable(Optimizer, Call(print, (tokens, Trainer(tokens), names, {"data": tokens})))
    assert [sgd] == reachable(Optimizer, Call(print, ([sgd] * MOST,)))
