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
