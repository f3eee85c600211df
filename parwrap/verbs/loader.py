"""``for batch in loader`` and ``len(loader)``: hand the calls to ``actor.iterate`` and ``actor.length``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from parwrap.patching import Patch

__all__ = ["iterate_patches", "length_patches"]


def iterate_patches(actor: Any) -> list[Patch]:
    original = DataLoader.__iter__

    def iterate(wrapped: Any, instance: DataLoader, args: tuple, kwargs: dict) -> Iterator:
        return actor.iterate(instance, original)

    return [Patch(DataLoader, "__iter__", iterate)]


def length_patches(actor: Any) -> list[Patch]:
    original = DataLoader.__len__

    def length(wrapped: Any, instance: DataLoader, args: tuple, kwargs: dict) -> int:
        return actor.length(instance, original)

    return [Patch(DataLoader, "__len__", length)]
