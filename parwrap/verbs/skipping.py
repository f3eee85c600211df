"""``optimizer.step()``: ask ``actor.skips(optimizer)`` whether this one is to do nothing.

A hook cannot leave a step out, but it can exchange the ``self`` that the step gets: a step that is skipped runs on an image of the
optimizer that has no parameters. So the optimizer is never changed, and nothing has to be put back, also if the step raises.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torchs

__all__ = ["patches"]

MARK = "_parwrap_image"

STEP = Optimizer.profile_hook_step(print).__code__
"""Of the function that torch puts around the ``step`` of every class, which calls the hooks."""


def patches(actor: Any) -> list[AbstractContextManager]:
    """While ``actor.skips(optimizer)`` is true, a step leaves parameters, state and gradients as they are.

    A closure is still called, once, and its loss returned; learning rate schedulers count the step. The actor that was installed
    last is asked first, and the others only if it lets the step through.
    """

    def exchange(optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        # what a subclass hands on to super().step() is an image already, and so it is after another actor has skipped
        if hasattr(args[0], MARK) or _handed_on(optimizer) or not actor.skips(optimizer):
            return None
        return (_image(optimizer), *args[1:]), kwargs

    return [_hooked_first(exchange)]


def _handed_on(optimizer: Optimizer) -> bool:
    """Whether this is ``super().step()`` of a step that was asked for already; torch may have put its hooks around both."""
    if sum(hasattr(vars(cls).get("step"), "hooked") for cls in type(optimizer).__mro__) < 2:
        return False
    frame = sys._getframe(2).f_back  # 2 is the function that asks now
    while frame is not None:
        if frame.f_code is STEP and frame.f_locals["self"] is optimizer:
            return True
        frame = frame.f_back
    return False


def _image(optimizer: Optimizer) -> Any:
    """An optimizer with the same options and no parameters; what its ``step`` counts or remembers is lost."""
    image = object.__new__(type(optimizer))
    empty: dict[int, list] = {id(group["params"]): [] for group in optimizer.param_groups}
    groups = [{**group, "params": empty[id(group["params"])]} for group in optimizer.param_groups]
    # LBFGS keeps the list of its first group, and wants something in it: a parameter without a gradient
    kept = {name: [torch.zeros(1)] for name, value in vars(optimizer).items() if id(value) in empty}
    vars(image).update({**vars(optimizer), **kept, "param_groups": groups, "state": copy.copy(optimizer.state), MARK: True})
    return image


@contextmanager
def _hooked_first(before_step: Any) -> Iterator[None]:
    handle = torchs.register_optimizer_step_pre_hook(before_step)
    torchs._global_optimizer_pre_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        handle.remove()
