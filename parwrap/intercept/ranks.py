"""Queries to ``torch.distributed`` about the process group.

``Interceptor.world_size_asked`` is called at each ``get_world_size()``, including that of ``parwrap.world_size()``. If
``Interceptor.hides_group`` is true for the caller's frame, the functions behave as if there were no process group.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from parwrap.intercept.interceptor import Interceptor
from parwrap.patching.patch import Patch

__all__ = ["hiding_patches", "patches"]


def patches(interceptor: Interceptor) -> list[Patch]:
    def world_size(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> int:
        interceptor.world_size_asked()
        return wrapped(*args, **kwargs)

    return [Patch(dist, "get_world_size", world_size)]


def hiding_patches(interceptor: Interceptor) -> list[Patch]:
    def is_initialized(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> bool:
        return not interceptor.hides_group(sys._getframe(1)) and wrapped(*args, **kwargs)

    def of_group(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
        group = args[0] if args else kwargs.get("group")
        if group is None and interceptor.hides_group(sys._getframe(1)):
            raise ValueError(
                "Default process group has not been initialized, please make sure to call init_process_group. "
                f"parwrap hides its own from plain scripts: use parwrap.rank() and parwrap.world_size() instead of {wrapped.__name__}()."
            )
        return wrapped(*args, **kwargs)

    return [
        Patch(dist, "is_initialized", is_initialized),
        *(Patch(dist, name, of_group) for name in ("get_rank", "get_world_size", "get_backend")),
    ]
