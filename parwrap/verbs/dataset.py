"""``loader.dataset``: hand to ``actor.dataset`` what is asked for.

It is an attribute of each loader, so while an actor wants to know, the class has a property in its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch.utils.data import DataLoader

__all__ = ["patches"]


def patches(actor: Any) -> list[AbstractContextManager]:
    return [_property(actor)]


@contextmanager
def _property(actor: Any) -> Iterator[None]:
    def get(loader: DataLoader) -> Any:
        if "dataset" not in vars(loader):
            raise AttributeError(f"'{type(loader).__name__}' object has no attribute 'dataset'", name="dataset", obj=loader)
        return actor.dataset(loader, vars(loader)["dataset"])

    cls: Any = DataLoader
    before = vars(cls).get("dataset")
    cls.dataset = property(get, lambda loader, dataset: vars(loader).update(dataset=dataset))
    try:
        yield
    finally:
        if before is None:
            del cls.dataset
        else:
            cls.dataset = before
