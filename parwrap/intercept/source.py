"""``loader.dataset`` and ``loader.sampler``: ``Interceptor.source`` returns what the script reads from them.

These are attributes of each loader, so while an interceptor is installed, properties of the class replace them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch.utils.data import DataLoader

from parwrap.intercept.interceptor import Interceptor

__all__ = ["NAMES", "patches"]

NAMES = ("dataset", "sampler", "batch_sampler")


def patches(interceptor: Interceptor) -> list[AbstractContextManager]:
    return [_property(interceptor, name) for name in NAMES]


@contextmanager
def _property(interceptor: Interceptor, name: str) -> Iterator[None]:
    def get(loader: DataLoader) -> Any:
        if name not in vars(loader):
            raise AttributeError(f"'{type(loader).__name__}' object has no attribute '{name}'", name=name, obj=loader)
        return interceptor.source(loader, name, vars(loader)[name])

    before = vars(DataLoader).get(name)
    setattr(DataLoader, name, property(get, lambda loader, source: vars(loader).update({name: source})))
    try:
        yield
    finally:
        if before is None:
            delattr(DataLoader, name)
        else:
            setattr(DataLoader, name, before)
