"""``optimizer.step()``: skip it where ``Interceptor.skips`` or ``leaves_out`` says so.

A hook cannot skip a step, but it can exchange the step's ``self``: a skipped step runs on a copy of the optimizer without parameters, its
*image*. So the optimizer is never changed, and nothing has to be restored if the step raises.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from parwrap.errors import UsageError
from parwrap.intercept.step_hooks import MARK, WHY, closure_of, in_own_step, is_image
from parwrap.places import script_place
from parwrap.torch_private.dynamo import outside
from parwrap.torch_private.optimizer import global_post_hooks, global_pre_hooks
from parwrap.torch_private.tensors import version_of

if TYPE_CHECKING:
    from parwrap.intercept.interceptor import Interceptor

__all__ = ["leaving_out", "skipping"]


def skipping(interceptor: Interceptor) -> list[Any]:
    """The hooks that skip a step if ``interceptor`` says so. A skip leaves parameters and gradients unchanged. Schedulers count it.

    The last installed interceptor is asked first, and the others only if it lets the step through.
    """
    return _without(interceptor.skips, left_out=False)


def leaving_out(interceptor: Interceptor) -> list[Any]:
    """Like :func:`skipping`, for steps that are left out because gradients are not finite."""
    return _without(interceptor.leaves_out, left_out=True)


def _without(skips: Callable[[Optimizer], bool], left_out: bool) -> list[Any]:
    before: list[tuple[torch.Tensor, int]] = []

    def exchange(optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        before.clear()
        # in super().step() of a subclass, self may be an image already, or the step is the one that was let through
        if is_image(args[0]) or closure_of(args, kwargs) is not None or in_own_step(optimizer) or not skips(optimizer):
            return None
        before.extend((p, version_of(p)) for group in optimizer.param_groups for p in group["params"])
        return (_image(optimizer, left_out), *args[1:]), kwargs

    def check(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        for p, version in before:
            if version_of(p) != version:
                raise UsageError(
                    f"{script_place()}: {type(optimizer).__name__}.step() has changed a parameter of shape {tuple(p.shape)} in a step "
                    "that parwrap has to skip. Let step() iterate over the parameters in self.param_groups, or train this part without "
                    "parwrap.amp and parwrap.accumulate."
                )
        before.clear()

    return [
        _first(register_optimizer_step_pre_hook, global_pre_hooks, exchange),
        _first(register_optimizer_step_post_hook, global_post_hooks, check),
    ]


def _image(optimizer: Optimizer, left_out: bool) -> Any:
    """A copy of ``optimizer`` without parameters, whose ``step`` changes nothing that stays: changes of its state are lost."""
    image = object.__new__(type(optimizer))  # copy.copy would lose attributes
    groups = [{**group, "params": []} for group in optimizer.param_groups]
    vars(image).update({**vars(optimizer), "param_groups": groups, "state": copy.copy(optimizer.state), MARK: left_out})
    return image


@contextmanager
def _first(register: Callable, hooks: OrderedDict[int, Callable], hook: Callable) -> Iterator[None]:
    """Inside the block, ``hook`` runs on every step, before all other hooks."""
    handle = register(outside(hook, WHY))
    hooks.move_to_end(handle.id, last=False)
    try:
        yield
    finally:
        handle.remove()
