"""Operations on sharded tensors (``DTensor``) and their ``repr``: forward them to ``call_sharded`` and ``show_sharded``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from parwrap.intercept.interceptor import Interceptor
from parwrap.patching.patch import Patch

__all__ = ["call_patches", "show_patches"]


def call_patches(interceptor: Interceptor) -> list[Patch]:
    from torch.distributed.tensor import DTensor  # which takes long to import

    def torch_function(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
        return _bound(*args, **kwargs)

    def _bound(func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return interceptor.call_sharded(func, types, args, kwargs or {})

    return [Patch(DTensor, "__torch_function__", torch_function)]


def show_patches(interceptor: Interceptor) -> list[Patch]:
    from torch.distributed.tensor import DTensor

    def show(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> str:
        return interceptor.show_sharded(instance)

    return [Patch(DTensor, "__repr__", show)]
