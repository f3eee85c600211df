"""Optimizers that set their own learning rate in ``step``, with lr="linear", against loops that multiply the rate by hand."""

import pytest
import torch
from torch import nn

import parwrap


class Decaying(torch.optim.Optimizer):
    """SGD whose rate shrinks in each step, from what the group says."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = group["lr"] * 0.5
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"])


class DecayingInPlace(Decaying):
    """The rate is a tensor."""

    def __init__(self, params, lr):
        super().__init__(params, torch.tensor(lr))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"].mul_(0.5)
            for p in group["params"]:
                p.sub_(p.grad * group["lr"])


class DecayingAfterwards(Decaying):
    """The rate of the next step is a number of its own, from a schedule that the optimizer has."""

    count = 0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"])
            self.count += 1
            group["lr"] = (0.1, 0.05, 0.01, 0.005, 0.001)[self.count] * self.defaults["lr"] / 0.1


class Relative(torch.optim.SGD):
    """No rate is given: it is found in the step, as by Adafactor."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        for group in self.param_groups:
            group["lr"] = None

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=0.1)


def hooked(params, lr):
    """A plain SGD with a schedule that steps in a hook."""
    optimizer = torch.optim.SGD(params, lr)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.register_step_post_hook(lambda *_: schedule.step())
    return optimizer


def stepped(optimizer_of, factor=1.0):
    """The weight after some steps, and the rates that the loop sees."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = optimizer_of([weight], lr=0.1 * factor)
    rates = []
    for _ in range(4):
        optimizer.zero_grad()
        (weight**2).sum().backward()
        optimizer.step()
        rate = optimizer.param_groups[0]["lr"]
        rates.append(rate if rate is None else float(rate) / factor)
    return weight.item(), rates


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("nothing_is_warned_of")
@pytest.mark.parametrize("optimizer_of", [Decaying, DecayingInPlace, hooked])
def test_a_rate_computed_from_the_groups_own_is_the_loops_times_the_factor(optimizer_of):
    expected, rates = stepped(optimizer_of, 2.0)
    with parwrap.distributed(lr="linear"):
        weight, seen = stepped(optimizer_of)

    assert expected == pytest.approx(weight, rel=1e-6)
    assert rates == pytest.approx(seen)


@pytest.mark.ranks(2)
def test_a_rate_that_a_step_sets_for_the_next_is_kept_and_said():
    expected, rates = stepped(DecayingAfterwards, 2.0)
    with (
        parwrap.distributed(lr="linear"),
        pytest.warns(UserWarning, match="DecayingAfterwards sets lr in its step.*by 2 yourself") as warned,
    ):
        weight, seen = stepped(DecayingAfterwards)

    assert expected == pytest.approx(weight, rel=1e-6)
    assert rates == pytest.approx(seen)
    assert 1 == len(warned)


@pytest.mark.ranks(2)
def test_a_group_without_a_rate_is_left_alone():
    expected = stepped(Relative)
    with parwrap.distributed(lr="linear"):
        assert expected == stepped(Relative)


@pytest.mark.ranks(2)
def test_a_group_that_a_step_has_set_back_to_plain_numbers_holds_no_others():
    optimizer = Decaying([nn.Parameter(torch.ones(1))], lr=0.1)
    with parwrap.distributed(lr="linear"):
        (optimizer.param_groups[0]["params"][0] ** 2).sum().backward()
        optimizer.step()

    assert float is type(optimizer.param_groups[0]["lr"])
