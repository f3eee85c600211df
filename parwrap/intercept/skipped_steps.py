"""``optimizer.step()``: skip it where ``Interceptor.skips`` or ``leaves_out`` says so, and exchange its closure.

A hook cannot skip a step, but it can exchange the step's ``self``: a skipped step runs on a copy of the optimizer without parameters, its
*image*. So the optimizer is never changed, and nothing has to be restored if the step raises.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from parwrap.errors import UsageError
from parwrap.places import script_place
from parwrap.torch_private.dynamo import outside
from parwrap.torch_private.optimizer import STEP, global_post_hooks, global_pre_hooks
from parwrap.torch_private.tensors import version_of

if TYPE_CHECKING:
    from parwrap.intercept.interceptor import Interceptor

__all__ = ["closures", "hooked", "is_image", "is_left_out", "leaving_out", "skipping"]

WHY = "parwrap counts steps outside of graphs: compile without fullgraph=True, or leave optimizer.step() out"

MARK = "_parwrap_image"
"""The name of an attribute that only images have. Its value is whether the step is left out because gradients are not finite."""


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
        if is_image(args[0]) or _closure(args, kwargs) is not None or _in_own_step(optimizer) or not skips(optimizer):
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

    return [hooked(exchange, first=True), hooked(check, after=True, first=True)]


def closures(interceptor: Interceptor) -> list[Any]:
    """The hooks that replace the closure of a step by the one that ``interceptor.closure`` returns."""

    def exchange(optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        closure = _closure(args, kwargs)
        if closure is None or is_image(args[0]) or _in_own_step(optimizer):
            return None
        exchanged = interceptor.closure(optimizer, closure)
        return tuple(exchanged if each is closure else each for each in args), {
            name: exchanged if each is closure else each for name, each in kwargs.items()
        }

    return [hooked(exchange, first=True)]


def is_image(optimizer: Any) -> bool:
    """Whether ``optimizer`` is the image that a skipped step runs on."""
    return MARK in vars(optimizer)


def is_left_out(optimizer: Any) -> bool:
    """Whether ``optimizer`` is the image of a step that is left out because gradients are not finite."""
    return bool(vars(optimizer).get(MARK))


def _closure(args: tuple, kwargs: dict) -> Callable | None:
    if len(args) == 1 and not kwargs:
        return None
    return next((each for each in (*args[1:], *kwargs.values()) if callable(each)), None)


def _in_own_step(optimizer: Optimizer) -> bool:
    """Whether the running hook belongs to a ``super().step()`` inside a step of ``optimizer``. Torch may have added hooks to both steps."""
    if sum(hasattr(vars(kind).get("step"), "hooked") for kind in type(optimizer).__mro__) < 2:
        return False
    frame: FrameType | None = sys._getframe(1)
    steps = 0
    while frame is not None:
        steps += frame.f_code is STEP and frame.f_locals["self"] is optimizer
        frame = frame.f_back
    return steps > 1


def _image(optimizer: Optimizer, left_out: bool) -> Any:
    """A copy of ``optimizer`` without parameters, whose ``step`` changes nothing that stays: changes of its state are lost."""
    image = object.__new__(type(optimizer))  # copy.copy would lose attributes
    groups = [{**group, "params": []} for group in optimizer.param_groups]
    vars(image).update({**vars(optimizer), "param_groups": groups, "state": copy.copy(optimizer.state), MARK: left_out})
    return image


@contextmanager
def hooked(hook: Any, after: bool = False, first: bool = False) -> Iterator[None]:
    """Inside the block, torch runs ``hook`` on every step: before the step or, with ``after``, after it; ``first`` of all hooks, or last.

    ``step`` itself is not patched, because ``Optimizer.__init__`` wraps the ``step`` of each class that it sees for the first time.
    """
    handle = (register_optimizer_step_post_hook if after else register_optimizer_step_pre_hook)(outside(hook, WHY))
    if first:
        (global_post_hooks if after else global_pre_hooks).move_to_end(handle.id, last=False)
    try:
        yield
    finally:
        handle.remove()
