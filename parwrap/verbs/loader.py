"""``for batch in loader``, ``len(loader)`` and the state of loaders that have one: hand the calls to the actor.

They go to ``actor.iterate``, ``length``, ``loader_state`` and ``load_loader_state``. torchdata's loader derives from torch's, but
iterates in a way of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

from torch.utils.data import DataLoader

from parwrap.patching import Patch

__all__ = ["iterate_patches", "length_patches", "load_state_patches", "state_patches"]


def iterate_patches(actor: Any) -> list[Patch]:
    return [_iterate_patch(actor, kind) for kind in (DataLoader, *_stateful())]


def _iterate_patch(actor: Any, kind: Any) -> Patch:
    original = kind.__iter__

    def iterate(wrapped: Any, instance: DataLoader, args: tuple, kwargs: dict) -> Iterator:
        return actor.iterate(instance, original)

    return Patch(kind, "__iter__", iterate)


def length_patches(actor: Any) -> list[Patch]:
    original = DataLoader.__len__

    def length(wrapped: Any, instance: DataLoader, args: tuple, kwargs: dict) -> int:
        return actor.length(instance, original)

    return [Patch(DataLoader, "__len__", length)]


def state_patches(actor: Any) -> list[Patch]:
    def state_dict(wrapped: Callable, instance: DataLoader, args: tuple, kwargs: dict) -> dict:
        return actor.loader_state(instance, wrapped)

    return [Patch(kind, "state_dict", state_dict) for kind in _stateful()]


def load_state_patches(actor: Any) -> list[Patch]:
    def load_state_dict(wrapped: Callable, instance: DataLoader, args: tuple, kwargs: dict) -> None:
        return (lambda state_dict: actor.load_loader_state(instance, wrapped, state_dict))(*args, **kwargs)

    return [Patch(kind, "load_state_dict", load_state_dict) for kind in _stateful()]


@functools.cache
def _stateful() -> tuple[type[DataLoader], ...]:
    """torchdata's loader, where it is installed: a script may import it when it runs already."""
    if find_spec("torchdata") is None:
        return ()
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError:
        return ()  # before it had one
    return (StatefulDataLoader,)
