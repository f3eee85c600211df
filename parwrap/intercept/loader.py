"""``for batch in loader``, ``len(loader)`` and the state of stateful loaders: forward the calls to the interceptor.

They go to ``iterate``, ``length``, ``loader_state`` and ``load_loader_state``. torchdata's loader derives from torch's, but overrides the
iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

from torch.utils.data import DataLoader

from parwrap.intercept.interceptor import Interceptor
from parwrap.patching.patch import Patch, when_imported

__all__ = ["iterate_patches", "length_patches", "load_state_patches", "state_patches"]

STATEFUL = "torchdata.stateful_dataloader.stateful_dataloader"
"""The module of the stateful loaders."""


def iterate_patches(interceptor: Interceptor) -> list[Patch | AbstractContextManager]:
    def patch(kind: Any) -> Patch:
        original = kind.__iter__

        def iterate(wrapped: Any, instance: DataLoader, args: tuple, kwargs: dict) -> Iterator:
            return interceptor.iterate(instance, original)

        return Patch(kind, "__iter__", iterate)

    return [patch(DataLoader), _of_stateful(patch)]


def length_patches(interceptor: Interceptor) -> list[Patch]:
    original = DataLoader.__len__

    def length(wrapped: Any, instance: DataLoader, args: tuple, kwargs: dict) -> int:
        return interceptor.length(instance, original)

    return [Patch(DataLoader, "__len__", length)]


def state_patches(interceptor: Interceptor) -> list[AbstractContextManager]:
    def state_dict(wrapped: Callable, instance: DataLoader, args: tuple, kwargs: dict) -> dict:
        return interceptor.loader_state(instance, wrapped)

    return [_of_stateful(lambda kind: Patch(kind, "state_dict", state_dict))]


def load_state_patches(interceptor: Interceptor) -> list[AbstractContextManager]:
    def load_state_dict(wrapped: Callable, instance: DataLoader, args: tuple, kwargs: dict) -> None:
        return (lambda state_dict: interceptor.load_loader_state(instance, wrapped, state_dict))(*args, **kwargs)

    return [_of_stateful(lambda kind: Patch(kind, "load_state_dict", load_state_dict))]


def _of_stateful(patch: Callable[[Any], Patch]) -> AbstractContextManager:
    def patches(module: ModuleType) -> list[Patch]:
        return [patch(module.StatefulDataLoader)]

    return when_imported(STATEFUL, patches)
