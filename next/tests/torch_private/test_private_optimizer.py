"""The private names of optimizers that parwrap uses."""

import torch

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
