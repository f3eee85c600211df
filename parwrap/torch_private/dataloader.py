"""Private names of ``DataLoader``: the iterator that it keeps, what that reads, and what a worker knows of itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils.data import DataLoader, dataloader
from torch.utils.data._utils import worker

__all__ = [
    "INDEX_SAMPLER",
    "ITERATOR",
    "BaseDataLoaderIter",
    "MultiProcessingDataLoaderIter",
    "batches_yielded",
    "is_shut_down",
    "kept_iterator",
    "mark_shut_down",
    "set_worker_info",
    "worker_info",
]

BaseDataLoaderIter = dataloader._BaseDataLoaderIter
"""The type of all iterators over loaders. It has no public name."""

MultiProcessingDataLoaderIter = dataloader._MultiProcessingDataLoaderIter
"""The type of iterators over loaders with workers. It has no public name."""

ITERATOR = "_iterator"
"""The attribute in which a loader with persistent workers keeps its iterator. There is no public one."""

INDEX_SAMPLER = "_index_sampler"
"""The attribute in which an iterator keeps the sampler that it reads: of batches, or of samples without batches. It is not public."""

worker_info: Callable[[], Any] = partial(getattr, worker, "_worker_info")
"""What ``get_worker_info()`` returns, read beside :data:`set_worker_info`."""

set_worker_info: Callable[[Any], None] = partial(setattr, worker, "_worker_info")
"""Sets what ``get_worker_info()`` returns, by which a dataset shards itself. Publicly it can only be read."""


def kept_iterator(loader: DataLoader) -> Any:
    """The iterator that a loader with persistent workers keeps between passes, else ``None``. There is no public way to it."""
    return loader._iterator


def batches_yielded(iterator: Any) -> int:
    """How many batches an iterator over a loader has given. It does not say so publicly."""
    return iterator._num_yielded


def is_shut_down(iterator: Any) -> bool:
    """Whether the workers of an iterator have been ended. It does not say so publicly."""
    return iterator._shutdown


def mark_shut_down(iterator: Any) -> None:
    """Make an iterator treat its workers as ended, so that a forked process does not end its parent's. Nothing public does that."""
    iterator._shutdown = True
