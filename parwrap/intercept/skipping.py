"""``optimizer.step()``: ask ``Interceptor.skips`` whether to skip it.

A hook cannot skip a step, but it can replace the step's ``self``: a skipped step runs on a copy of the optimizer without parameters, its
*image*. So the optimizer is never changed, and nothing has to be restored, even if the step raises. Changes that the image cannot prevent
are detected afterwards, by the versions of the parameters.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torchs

from parwrap.coordination.call_site import location
from parwrap.errors import UsageError
from parwrap.intercept.interceptor import Interceptor
from parwrap.torch_private.optimizer import global_post_hooks, global_pre_hooks
from parwrap.torch_private.tensors import version_of

__all__ = ["handed_on", "has_inner", "is_image", "patches", "stepping", "steps_running"]

MARK = "_parwrap_image"

STEP = Optimizer.profile_hook_step(print).__code__
"""Code of the function that torch puts around the ``step`` of every class; it calls the hooks."""


def patches(interceptor: Interceptor) -> list[AbstractContextManager]:
    """A skipped step leaves parameters, state and gradients unchanged.

    A closure is still called once, and its loss returned, unless ``refuse_closure`` raises an error. Learning rate schedulers count the
    step. The last installed interceptor is asked first, and the others only if it lets the step through.
    """

    before: dict[int, list[tuple[torch.Tensor, int]]] = {}

    def exchange(optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        # self is already an image in super().step() of a subclass, and after another interceptor has skipped the step
        if is_image(args[0]) or handed_on(optimizer):
            return None
        before.clear()  # a step that raises an error does not report its end
        if any(callable(each) for each in (*args[1:], *kwargs.values())):
            interceptor.refuse_closure()
        if not interceptor.skips(optimizer):
            return None
        several = _with_inner(optimizer, [])
        owned = {id(p): p for each in several for group in each.param_groups for p in group["params"]}
        if len(args) == 1 and not kwargs:  # a closure may change them in its forward pass
            before[id(optimizer)] = [(p, version_of(p)) for p in owned.values()]
        return (_image(optimizer, owned, {}), *args[1:]), kwargs

    def check(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        for p, version in before.pop(id(optimizer), ()):
            if version_of(p) != version:
                raise UsageError(
                    f"{type(optimizer).__name__}.step() at {location()} has changed a parameter of shape {tuple(p.shape)} in a step that "
                    "parwrap has to skip. Either step() does not use self.param_groups, or a hook on it changes weights. Let step() "
                    "iterate over the parameters in self.param_groups, or train this part without parwrap.amp and parwrap.accumulate."
                )

    return [_hooked_first(exchange), _hooked_first(check, after=True)]


def is_image(optimizer: Any) -> bool:
    """Whether ``optimizer`` is the image that a skipped step runs on."""
    return hasattr(optimizer, MARK)


def handed_on(optimizer: Optimizer) -> bool:
    """Whether a hook runs for ``super().step()`` within a step that has already called it; torch may have added hooks to both."""
    if sum(hasattr(vars(cls).get("step"), "hooked") for cls in type(optimizer).__mro__) < 2:
        return False
    frame = sys._getframe(2).f_back  # frame 2 is the function that asks
    while frame is not None:
        if frame.f_code is STEP and frame.f_locals["self"] is optimizer:
            return True
        frame = frame.f_back
    return False


def has_inner(optimizer: Optimizer) -> bool:
    """Whether ``optimizer`` wraps another optimizer and steps it, as Lookahead does."""
    return len(_with_inner(optimizer, [])) > 1


def _with_inner(optimizer: Optimizer, known: list[Optimizer]) -> list[Optimizer]:
    """``known``, ``optimizer`` and the optimizers in its attributes, such as the one that Lookahead wraps."""
    known.append(optimizer)
    for attribute in vars(optimizer).values():
        for value in _values(attribute):
            if isinstance(value, Optimizer) and hasattr(value, "param_groups") and all(value is not each for each in known):
                _with_inner(value, known)
    return known


def _values(attribute: Any) -> Collection[Any]:
    if isinstance(attribute, dict):
        return attribute.values()
    return attribute if isinstance(attribute, (list, tuple)) else (attribute,)


def _image(optimizer: Optimizer, owned: Collection[int], images: dict[int, Any]) -> Any:
    """An optimizer with the same options but no parameters. State that its ``step`` changes is lost.

    Args:
        optimizer: the original.
        owned: the ids of all parameters, which are removed from its attributes too.
        images: existing images by the id of the optimizer; the new one is added.
    """
    image = images[id(optimizer)] = object.__new__(type(optimizer))
    empty: dict[int, list] = {id(group["params"]): [] for group in optimizer.param_groups}
    groups = [{**group, "params": empty[id(group["params"])]} for group in optimizer.param_groups]

    def hidden(value: Any) -> bool:
        return id(value) in owned or isinstance(value, Optimizer)

    def without(value: Any) -> Any:
        if isinstance(value, Optimizer) and hasattr(value, "param_groups"):
            return images[id(value)] if id(value) in images else _image(value, owned, images)
        if id(value) in empty:  # LBFGS keeps the list of its first group, which must not be empty: it gets a parameter without a gradient
            return [torch.zeros(1)]
        if value is optimizer.param_groups:
            return groups
        if isinstance(value, (list, tuple)) and any(map(hidden, value)):
            left = [without(each) for each in value if id(each) not in owned]
            return left if isinstance(value, list) else tuple(left)
        if isinstance(value, dict) and any(hidden(key) or hidden(each) for key, each in value.items()):
            return {key: without(each) for key, each in value.items() if id(key) not in owned and id(each) not in owned}
        return value

    attributes = {name: without(value) for name, value in vars(optimizer).items() if name != "state"}
    vars(image).update({**attributes, "param_groups": groups, "state": copy.copy(optimizer.state), MARK: True})
    return image


def steps_running() -> int:
    """The number of nested optimizer steps that run where this is called.

    >>> steps_running()
    0
    """
    return len(stepping())


def stepping() -> list[Optimizer]:
    """The optimizers whose steps run where this is called; the step of each is part of the step of the next.

    >>> stepping()
    []
    """
    running, frame = [], sys._getframe(1)
    while frame is not None:
        if frame.f_code is STEP:
            running.append(frame.f_locals["self"])
        frame = frame.f_back  # type: ignore[assignment]
    return running


@contextmanager
def _hooked_first(hook: Any, after: bool = False) -> Iterator[None]:
    handle = (torchs.register_optimizer_step_post_hook if after else torchs.register_optimizer_step_pre_hook)(hook)
    (global_post_hooks if after else global_pre_hooks).move_to_end(handle.id, last=False)
    try:
        yield
    finally:
        handle.remove()
