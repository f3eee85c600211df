"""``optimizer.step()``: one hook before and one after every step call the methods of all interceptors.

``step`` itself is not patched, because ``Optimizer.__init__`` wraps the ``step`` of each class that it sees for the first time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from parwrap.torch_private.dynamo import left_out, running_compiler, without_compiler
from parwrap.torch_private.optimizer import STEP

__all__ = ["MARK", "WHY", "after", "before", "closure_of", "closures", "hooked", "in_own_step", "is_image", "left_out_steps", "steps_run"]

WHY = "parwrap counts steps outside of graphs: compile without fullgraph=True, or leave optimizer.step() out"

MARK = "_parwrap_image"
"""The name of an attribute that only images have. Its value is whether the step is left out because gradients are not finite."""

closures: list[Callable[[Optimizer, Callable], Callable]] = []
"""The installed ``Interceptor.closure``, the newest first: the others get the closure that it returns."""

before: list[Callable[[Optimizer], None]] = []
"""The installed ``Interceptor.step``."""

after: list[Callable[[Optimizer], None]] = []
"""The installed ``Interceptor.stepped``."""

left_out_steps: list[Callable[[Optimizer], None]] = []
"""The installed ``Interceptor.left_out``."""

_LISTS = closures, before, after, left_out_steps
_handles: list[Any] = []
_ran = 0
_compiler = running_compiler()


@contextmanager
def hooked(methods: list[Any], method: Callable, first: bool = False) -> Iterator[None]:
    """Inside the block, ``method`` is in one of the lists above, at its end or ``first``."""
    if not any(_LISTS):
        _handles.extend([register_optimizer_step_pre_hook(_before), register_optimizer_step_post_hook(_after)])
    methods.insert(0 if first else len(methods), method)
    try:
        yield
    finally:
        methods.remove(method)
        while _handles and not any(_LISTS):
            _handles.pop().remove()


def _before(optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    if _compiler() is not None:  # here and not in a function around this one, which would be one more call in every step
        return _uncompiled(_before)(optimizer, args, kwargs)
    image = MARK in args[0].__dict__
    exchanged = _exchanged(optimizer, args, kwargs) if (len(args) > 1 or kwargs) and not image else None
    if not image:
        for step in before:
            step(optimizer)
    return exchanged


def _after(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    global _ran
    if _compiler() is not None:
        return _uncompiled(_after)(optimizer, args, kwargs)
    _ran += 1
    image = args[0].__dict__.get(MARK)
    if image is None:
        for stepped in after:
            stepped(optimizer)
    elif image:
        for stepped in left_out_steps:
            stepped(optimizer)
    return None


@cache
def _uncompiled(hook: Callable) -> Callable:
    return without_compiler(hook, WHY)


for _hook in (_before, _after):
    vars(_hook).update(left_out(WHY))


def steps_run() -> int:
    """How many steps have run so far, including skipped ones, while an interceptor was installed."""
    return _ran


def _exchanged(optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """The arguments of a step with its closure replaced by the one that interceptors return; ``None`` if it has none."""
    given = closure_of(args, kwargs)
    if given is None or in_own_step(optimizer):
        return None
    exchanged = given
    for exchange in closures:
        exchanged = exchange(optimizer, exchanged)
    return tuple(exchanged if each is given else each for each in args), {
        name: exchanged if each is given else each for name, each in kwargs.items()
    }


def closure_of(args: tuple, kwargs: dict) -> Callable | None:
    """The closure among the arguments of a step."""
    return next((each for each in (*args[1:], *kwargs.values()) if callable(each)), None)


def in_own_step(optimizer: Optimizer) -> bool:
    """Whether the running hook belongs to a ``super().step()`` inside a step of ``optimizer``. Torch may have added hooks to both steps."""
    if sum(hasattr(vars(kind).get("step"), "hooked") for kind in type(optimizer).__mro__) < 2:
        return False
    frame: FrameType | None = sys._getframe(1)
    steps = 0
    while frame is not None:
        steps += frame.f_code is STEP and frame.f_locals["self"] is optimizer
        frame = frame.f_back
    return steps > 1


def is_image(optimizer: Any) -> bool:
    """Whether ``optimizer`` is the image that a skipped step runs on; see ``skipped_steps.py``."""
    return MARK in vars(optimizer)
