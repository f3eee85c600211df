"""``torch.save`` and ``torch.load``: forward them to ``save`` and ``load`` of the interceptor.

``Interceptor.saved`` replaces the object that is saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from parwrap.intercept.interceptor import Interceptor
from parwrap.patching.patch import Patch

__all__ = ["load_patches", "save_patches", "saved_patches"]


def save_patches(interceptor: Interceptor) -> list[Patch]:
    def save(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> None:
        def with_file(obj: Any, f: Any, *rest: Any, **options: Any) -> None:
            interceptor.save(f, lambda file: wrapped(obj, file, *rest, **options))

        with_file(*args, **kwargs)

    return [Patch(torch, "save", save)]


def saved_patches(interceptor: Interceptor) -> list[Patch]:
    def save(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> None:
        def with_object(obj: Any, *rest: Any, **options: Any) -> None:
            wrapped(interceptor.saved(obj), *rest, **options)

        with_object(*args, **kwargs)

    return [Patch(torch, "save", save)]


def load_patches(interceptor: Interceptor) -> list[Patch]:
    def load(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
        def with_file(f: Any, map_location: Any = None, *rest: Any, **options: Any) -> Any:
            return interceptor.load(map_location, lambda location: wrapped(f, location, *rest, **options))

        return with_file(*args, **kwargs)

    return [Patch(torch, "load", load)]
