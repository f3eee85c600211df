"""The private names of optimizers that parwrap uses."""

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from parwrap.torch_private import optimizer


def an_optimizer():
    return torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)


def test_hooks_on_one_step_are_seen():
    one = an_optimizer()
    assert ([], []) == tuple([*hooks.values()] for hooks in optimizer.step_hooks(one))
    one.register_step_pre_hook(print)
    one.register_step_post_hook(repr)

    assert ([print], [repr]) == tuple([*hooks.values()] for hooks in optimizer.step_hooks(one))


def test_steps_that_run_are_seen_innermost_first():
    seen = []

    class Inner(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            seen.append(optimizer.stepping())

    class Outer(torch.optim.SGD):
        def step(self, closure=None):
            inner.step()

    inner, outer = (kind([torch.ones(1, requires_grad=True)], lr=1.0) for kind in (Inner, Outer))
    outer.step()

    assert [[inner, outer]] == seen
    assert [] == optimizer.stepping()


@pytest.mark.parametrize(
    ("register", "hooks"),
    [
        (register_optimizer_step_pre_hook, optimizer.global_pre_hooks),
        (register_optimizer_step_post_hook, optimizer.global_post_hooks),
    ],
)
def test_hooks_on_all_steps_can_be_put_first(register, hooks):
    ran = []
    first = register(lambda *args: ran.append("first"))
    second = register(lambda *args: ran.append("second"))
    try:
        hooks.move_to_end(second.id, last=False)
        an_optimizer().step()
    finally:
        first.remove()
        second.remove()

    assert ["second", "first"] == ran


def test_the_step_of_every_class_runs_in_the_function_that_torch_puts_around_it():
    class Own(torch.optim.SGD):
        def step(self, closure=None):
            return None

    own = Own([torch.nn.Parameter(torch.zeros(1))])

    assert [optimizer.STEP] * 2 == [type(each).step.__code__ for each in (own, torch.optim.Adam(own.param_groups))]
