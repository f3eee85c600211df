"""Private names of ``DataLoader``: the iterator that it keeps, and its workers, which a forked process forgets."""

from __future__ import annotations

import os
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

__all__ = ["ITERATOR", "forget_workers", "kept_iterator"]

ITERATOR = "_iterator"
"""The attribute in which a loader with persistent workers keeps its iterator. It is not public."""


def kept_iterator(loader: DataLoader) -> Any:
    """The iterator that a loader with persistent workers keeps between passes, or ``None``. It is not public."""
    return loader._iterator


def forget_workers(loader: DataLoader) -> None:
    """Forget the persistent workers of ``loader`` if they belong to the process that this one was forked from, without ending them.

    Nothing public does that.
    """
    iterator: Any = loader._iterator
    if any(worker._parent_pid != os.getpid() for worker in getattr(iterator, "_workers", ())):
        if iterator._worker_pids_set:  # torch knows workers by the id of their iterator, which another may get
            signal_handling._remove_worker_pids(id(iterator))
        iterator._worker_pids_set, iterator._shutdown, loader._iterator = False, True, None
