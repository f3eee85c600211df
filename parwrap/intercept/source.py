"""``loader.dataset`` and ``loader.sampler``: hand to ``actor.source`` what a loader draws from when it is asked for.

These are attributes of each loader, so while an actor wants to know, the class has properties in their place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch.utils.data import DataLoader

__all__ = ["NAMES", "patches"]

NAMES = ("dataset", "sampler", "batch_sampler")


def patches(actor: Any) -> list[AbstractContextManager]:
    return [_property(actor, name) for name in NAMES]


@contextmanager
def _property(actor: Any, name: str) -> Iterator[None]:
    def get(loader: DataLoader) -> Any:
        if name not in vars(loader):
            raise AttributeError(f"'{type(loader).__name__}' object has no attribute '{name}'", name=name, obj=loader)
        return actor.source(loader, name, vars(loader)[name])

    before = vars(DataLoader).get(name)
    setattr(DataLoader, name, property(get, lambda loader, source: vars(loader).update({name: source})))
    try:
        yield
    finally:
        if before is None:
            delattr(DataLoader, name)
        else:
            setattr(DataLoader, name, before)
