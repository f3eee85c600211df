"""Learning rates that are larger in each step, and unchanged for the script."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR

import parwrap
from parwrap.loop.learning_rate import learning_rates_times


def weight(optimizer_of, steps=3, schedule=False, times=1.0):
    """A weight after some steps with a gradient of 1, and the rate that the script sees."""
    p = nn.Parameter(torch.zeros(()))
    optimizer = optimizer_of([p])
    scheduler = StepLR(optimizer, 1, 0.5) if schedule else None
    with learning_rates_times(lambda: times):
        for _ in range(steps):
            p.grad = torch.ones(())
            optimizer.step()
            if scheduler:
                scheduler.step()
    return p.item(), float(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("schedule", [False, True])
@pytest.mark.parametrize("kind", ["number", "tensor", "adam"])
def test_steps_are_larger_and_param_groups_are_the_scripts(kind, schedule):
    def of(rate):
        return {
            "number": lambda p: SGD(p, lr=rate, momentum=0.9),
            "tensor": lambda p: SGD(p, lr=torch.tensor(rate)),
            "adam": lambda p: Adam(p, lr=rate),
        }[kind]

    expected, _ = weight(of(0.4), schedule=schedule)
    actual, seen = weight(of(0.1), schedule=schedule, times=4.0)

    assert expected == pytest.approx(actual, rel=1e-6)
    assert (0.0125 if schedule else 0.1) == pytest.approx(seen)


class Decays(SGD):
    """Sets its rate in each step, from the rate that it has."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["lr"] *= 0.5


class Sets(SGD):
    """Sets its rate in each step, to a number, and steps by it."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = 0.25
            for p in group["params"]:
                p -= group["lr"] * p.grad


class HandsOn(SGD):
    """Sets its rate in each step, as a schedule of its own, and lets torch step by it."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = 0.25
        super().step(closure)


def test_a_rate_that_a_step_computes_from_its_own_is_divided_again():
    actual, seen = weight(lambda p: Decays(p, lr=0.1), times=4.0)

    assert -(0.4 + 0.2 + 0.1) == pytest.approx(actual)
    assert 0.0125 == pytest.approx(seen)


def test_a_rate_that_a_step_sets_is_kept_and_that_is_said_once():
    with pytest.warns(
        UserWarning, match=r"parwrap: Sets sets lr in its step\(\), to a number that is not computed from the lr in its param_groups"
    ) as said:
        actual, seen = weight(lambda p: Sets(p, lr=0.1), steps=5, times=4.0)

    assert (-1.25, 0.25) == (pytest.approx(actual), seen)
    assert 1 == len(said)


def test_a_rate_that_is_set_for_torchs_step_is_larger_in_it():
    SGD([nn.Parameter(torch.zeros(()))])  # torch calls the hooks of a class after its first optimizer was built
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        actual, seen = weight(lambda p: HandsOn(p, lr=0.1), steps=5, times=4.0)

    assert (-5.0, 0.25) == (pytest.approx(actual), seen)


def test_a_step_that_raises_leaves_the_rate_as_it_was():
    p = nn.Parameter(torch.zeros(()))
    optimizer = SGD([p], lr=0.1)

    def fails():
        raise ValueError("no loss")

    with learning_rates_times(lambda: 4.0), pytest.raises(ValueError, match="no loss"):
        optimizer.step(fails)
    assert 0.1 == optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("raises", [False, True])
def test_another_optimizer_may_step_in_a_closure(raises):
    def steps(rate, times):
        outer, inner = (SGD([nn.Parameter(torch.zeros(()))], lr=rate) for _ in range(2))
        ps = [each.param_groups[0]["params"][0] for each in (outer, inner)]

        def fails():
            raise ValueError("no loss")

        def closure():
            ps[0].grad, ps[1].grad = torch.ones(()), torch.ones(())
            inner.step()
            with contextlib.suppress(ValueError):
                inner.step(fails)
            if raises:
                fails()

        with learning_rates_times(lambda: times), contextlib.suppress(ValueError):
            outer.step(closure)
        assert [rate] * 2 == [each.param_groups[0]["lr"] for each in (outer, inner)]
        return [p.item() for p in ps]

    assert steps(0.4, times=1.0) == pytest.approx(steps(0.1, times=4.0))


def test_a_schedule_goes_on_from_the_rate_before_a_closure_that_raises():
    p = nn.Parameter(torch.zeros(()))
    optimizer = SGD([p], lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    fails = iter([False, True, False])

    def closure():
        if next(fails):
            raise ValueError("no loss")
        p.grad = torch.ones(())

    with learning_rates_times(lambda: 4.0):
        for _ in range(3):
            with contextlib.suppress(ValueError):
                optimizer.step(closure)
            schedule.step()

    assert 0.1 * 0.5**3 == pytest.approx(schedule.get_last_lr()[0])
    assert -4 * (0.1 + 0.025) == pytest.approx(p.item())


def test_a_factor_of_one_says_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weight(lambda p: Sets(p, lr=0.1), steps=5)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("lr", "factor"), [("keep", 1.0), ("linear", 2.0), ("sqrt", 2**0.5)])
def test_the_option_lr(lr, factor):
    def train():
        p = nn.Parameter(torch.zeros(()))
        optimizer = SGD([p], lr=0.1)
        (p * 1).backward()
        optimizer.step()
        return p.item()

    with parwrap.distributed(lr=lr):
        outer = train()
    with parwrap.distributed():
        inner = parwrap.distributed(lr=lr)(train)()

    assert [pytest.approx(-0.1 * factor)] * 2 == [outer, inner]
