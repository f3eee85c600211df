"""``Optimizer(...)``, ``add_param_group`` and ``step(closure)``: forward them to the interceptor.

They go to ``take_parameters``, ``own_parameters``, ``step``, ``stepped`` and ``closure``.

``Optimizer.__init__`` rewrites ``step`` of every class that it first sees, so a patch on ``step`` could not be removed exactly. Torch's
global optimizer hook runs at every ``step``, even of classes that are defined later, and can replace the arguments, so ``step`` is never
patched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from parwrap.intercept.interceptor import Interceptor
from parwrap.patching.patch import Patch

__all__ = ["closure_patches", "hooked", "own_parameters_patches", "step_patches", "stepped_patches", "take_parameters_patches"]


def take_parameters_patches(interceptor: Interceptor) -> list[Patch]:
    def add_param_group(wrapped: Callable, instance: Optimizer, args: tuple, kwargs: dict) -> None:
        def with_group(param_group: Any) -> None:
            if isinstance(param_group, dict) and "params" in param_group and not isinstance(param_group["params"], set):
                params = param_group["params"]
                param_group["params"] = interceptor.take_parameters([params] if isinstance(params, torch.Tensor) else list(params))
            wrapped(param_group)

        with_group(*args, **kwargs)

    return [Patch(Optimizer, "add_param_group", add_param_group)]


def own_parameters_patches(interceptor: Interceptor) -> list[Patch]:
    """``__init__`` calls ``add_param_group`` for each of its groups, so one patch covers both."""

    def add_param_group(wrapped: Callable, instance: Optimizer, args: tuple, kwargs: dict) -> None:
        wrapped(*args, **kwargs)
        interceptor.own_parameters(instance)

    return [Patch(Optimizer, "add_param_group", add_param_group)]


def closure_patches(interceptor: Interceptor) -> list[AbstractContextManager]:
    def exchange(optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if len(args) > 1 and callable(args[1]):
            return (args[0], interceptor.closure(args[1]), *args[2:]), kwargs
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": interceptor.closure(kwargs["closure"])}
        return None

    return [hooked(exchange)]


def step_patches(interceptor: Interceptor) -> list[AbstractContextManager]:
    return [hooked(lambda optimizer, args, kwargs: interceptor.step(optimizer))]


def stepped_patches(interceptor: Interceptor) -> list[AbstractContextManager]:
    return [hooked(lambda optimizer, args, kwargs: interceptor.stepped(optimizer), register_optimizer_step_post_hook)]


@contextmanager
def hooked(hook: Callable[[Optimizer, tuple, dict], Any], register: Callable = register_optimizer_step_pre_hook) -> Iterator[None]:
    """Make torch call ``hook`` at each step of any optimizer inside the block."""
    handle = register(hook)
    try:
        yield
    finally:
        handle.remove()
