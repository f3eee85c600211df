"""``optimizer.state_dict()`` and ``load_state_dict(state)``: forward them to ``optimizer_state`` and ``load_optimizer_state``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import Optimizer

from parwrap.intercept.interceptor import Interceptor
from parwrap.patching.patch import Patch

__all__ = ["load_patches", "save_patches"]


def save_patches(interceptor: Interceptor) -> list[Patch]:
    def state_dict(wrapped: Callable, instance: Optimizer, args: tuple, kwargs: dict) -> Any:
        return interceptor.optimizer_state(instance, partial(wrapped, *args, **kwargs))

    return [Patch(Optimizer, "state_dict", state_dict)]


def load_patches(interceptor: Interceptor) -> list[Patch]:
    def load_state_dict(wrapped: Callable, instance: Optimizer, args: tuple, kwargs: dict) -> None:
        return (lambda state_dict: interceptor.load_optimizer_state(instance, wrapped, state_dict))(*args, **kwargs)

    return [Patch(Optimizer, "load_state_dict", load_state_dict)]
