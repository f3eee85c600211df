"""Private names of ``DataLoader``: the iterator that it keeps."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

__all__ = ["ITERATOR", "forget_workers", "kept_iterator"]

ITERATOR = "_iterator"
"""The attribute in which a loader with persistent workers keeps its iterator. It is not public."""


def kept_iterator(loader: DataLoader) -> Any:
    """The iterator that a loader with persistent workers keeps between passes, or ``None``. It is not public."""
    return loader._iterator


def forget_workers(loader: DataLoader) -> None:
    """Let a forked process begin without the persistent workers of its parent, and without ending them. Nothing public does that."""
    if loader._iterator is not None:
        loader._iterator._shutdown = True  # type: ignore[attr-defined]
        loader._iterator = None
