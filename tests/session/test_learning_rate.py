"""Learning rates that grow with the ranks, against loops that multiply them by hand."""

import math

import pytest
import torch
from torch import nn

import parwrap
from parwrap.errors import UsageError


def stepped(optimizer_of, factor=1.0):
    """The weight after some steps with a schedule that sets a rate of its own, and the rates that the loop saw."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = optimizer_of([weight], lr=0.1 * factor)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2 * factor, total_steps=8)
    rates = []
    for _ in range(6):
        optimizer.zero_grad()
        (weight**2).sum().backward()
        optimizer.step()
        rates.append(optimizer.param_groups[0]["lr"] / factor)
        scheduler.step()
    return weight.item(), rates


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("lr", "factor"), [("keep", 1.0), ("linear", 2.0), ("sqrt", math.sqrt(2))])
@pytest.mark.parametrize("optimizer_of", [torch.optim.SGD, torch.optim.AdamW])
def test_steps_are_those_of_a_loop_with_larger_rates_and_the_loop_sees_its_own(lr, factor, optimizer_of):
    expected, rates = stepped(optimizer_of, factor)
    with parwrap.distributed(lr=lr):
        weight, seen = stepped(optimizer_of)

    assert expected == pytest.approx(weight, rel=1e-6)
    assert rates == pytest.approx(seen)


@pytest.mark.ranks(2)
def test_a_function_inside_has_a_rule_of_its_own():
    def step():
        weight = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=0.5)
        weight.sum().backward()
        optimizer.step()
        return weight.item()

    with parwrap.distributed():
        inside = parwrap.distributed(lr="linear")(step)
        assert (0.5, 0.0, 0.5) == (step(), inside(), step())
    with parwrap.distributed(lr="linear"):
        inside = parwrap.distributed(lr="keep")(step)
        assert (0.0, 0.5, 0.0) == (step(), inside(), step())


@pytest.mark.ranks(2)
def test_after_a_step_that_fails_the_rate_is_what_it_was():
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise ArithmeticError

    optimizer = Failing([nn.Parameter(torch.ones(1))], lr=0.5)
    with parwrap.distributed(lr="linear"), pytest.raises(ArithmeticError):
        optimizer.step()

    assert 0.5 == optimizer.param_groups[0]["lr"]


def test_one_rank_has_nothing_to_scale():
    with parwrap.distributed(lr="linear"):
        inside = stepped(torch.optim.SGD)

    assert inside == stepped(torch.optim.SGD)


def test_a_global_batch_that_does_not_grow_gives_nothing_to_scale_for():
    with pytest.raises(UsageError, match="lr='linear' has no effect with batch='global', because the global batch is that of a"):
        parwrap.distributed(lr="linear", batch="global")
