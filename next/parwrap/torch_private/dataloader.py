"""Private names of ``DataLoader``: the iterator that it keeps, the sampler of an iterator, and the information for a worker."""

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
"""The attribute in which a loader with persistent workers keeps its iterator. It is not public."""

INDEX_SAMPLER = "_index_sampler"
"""The attribute in which an iterator keeps its sampler: of batches, or of samples if it does not batch. It is not public."""

worker_info: Callable[[], Any] = partial(getattr, worker, "_worker_info")
"""Returns the same as ``get_worker_info()``, from where :data:`set_worker_info` puts it."""

set_worker_info: Callable[[Any], None] = partial(setattr, worker, "_worker_info")
"""Sets what ``get_worker_info()`` returns, with which a dataset shards itself. Publicly, it can only be read."""


def kept_iterator(loader: DataLoader) -> Any:
    """The iterator that a loader with persistent workers keeps between passes, or ``None``. It is not public."""
    return loader._iterator


def batches_yielded(iterator: Any) -> int:
    """The number of batches that an iterator over a loader has yielded. It is not public."""
    return iterator._num_yielded


def is_shut_down(iterator: Any) -> bool:
    """Whether the workers of an iterator have been shut down. It is not public."""
    return iterator._shutdown


def mark_shut_down(iterator: Any) -> None:
    """Make an iterator treat its workers as shut down, so that a forked process does not end its parent's. Nothing public does that."""
    iterator._shutdown = True
