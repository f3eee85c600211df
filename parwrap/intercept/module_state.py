"""``module.state_dict()`` and ``load_state_dict``: forward the outermost call to ``module_state`` and ``load_module_state``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from parwrap.intercept.interceptor import Interceptor
from parwrap.patching.patch import Patch

__all__ = ["load_patches", "save_patches"]


def save_patches(interceptor: Interceptor) -> list[Patch]:
    inside = False

    def state_dict(wrapped: Callable, instance: nn.Module, args: tuple, kwargs: dict) -> Any:
        nonlocal inside
        if inside:  # it calls itself for every submodule
            return wrapped(*args, **kwargs)
        inside = True
        try:
            state = wrapped(*args, **kwargs)
        finally:
            inside = False
        return interceptor.module_state(instance, state)

    return [Patch(nn.Module, "state_dict", state_dict)]


def load_patches(interceptor: Interceptor) -> list[Patch]:
    def load_state_dict(wrapped: Callable, instance: nn.Module, args: tuple, kwargs: dict) -> Any:
        interceptor.load_module_state(instance, bool(args[2] if len(args) > 2 else kwargs.get("assign")))
        return wrapped(*args, **kwargs)

    return [Patch(nn.Module, "load_state_dict", load_state_dict)]
