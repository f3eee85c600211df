"""Which batches of an evaluation pass each rank reads, so that no sample is read twice or missed.

Where batches are made of indices, each rank reads a block of consecutive ones, so that the ranks' results in order equal those of a single
process. Of a stream, whose end is unknown, the ranks take turns. Batches are those of one process and are never cut. ``merging.py``
combines the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from parwrap.loop.random_streams import get_state, set_state

__all__ = ["MOST", "Blocks", "Counted", "Turns", "block", "is_endless", "is_stream", "regular_sizes", "rows_of"]

MOST = 10**7
"""The most batches of one pass; an endless sampler never ends."""


def block(batches: int, rank: int, readers: int) -> range:
    """The positions in ``batches``, or samples, that ``rank`` reads: equally many for all ``readers``, one more for the first of them.

    >>> [list(block(5, rank, 3)) for rank in range(3)]
    [[0, 1], [2, 3], [4]]
    """
    small, larger = divmod(batches, readers)
    start = rank * small + min(rank, larger)
    return range(start, start + small + (rank < larger))


class Blocks:
    """A sampler that draws everything from ``within`` at once, on the shared streams, and yields the ``chosen`` part.

    Args:
        within: the loader's own sampler.
        shared: a function that returns a context manager; draws inside it use the right random streams.
        chosen: a function, called with all draws; returns this rank's.
    """

    def __init__(self, within: Iterable, shared: Callable[[], AbstractContextManager], chosen: Callable[[list], list]) -> None:
        self.within, self._shared, self._chosen = within, shared, chosen

    def __iter__(self) -> Iterator:
        with self._shared():
            drawn = list(islice(self.within, MOST + 1))
        yield from self._chosen(drawn)


class Counted:
    """A ``collate_fn`` that also reports how many samples are in the batch that ``collate`` makes."""

    def __init__(self, collate: Callable[[list], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list) -> tuple[int, Any]:
        return len(samples), self._collate(samples)


class Turns:
    """Every ``readers``-th batch of a stream, from the ``rank``-th on; all ranks draw the whole stream.

    A rank that gets no turn before the end yields the first batch as a stand-in.

    Args:
        batches: the stream.
        most: the number of ranks.
        begin: a function, called with up to ``most`` first batches; returns ``rank`` and ``readers``.
        ended: a function, called with the number of batches when the stream has ended.
    """

    def __init__(self, batches: Iterator, most: int, begin: Callable[[list], tuple[int, int]], ended: Callable[[int], None]) -> None:
        self._batches, self._most, self._begin, self._ended = batches, most, begin, ended
        self._turns: Iterator | None = None
        self._state: dict[str, Any] = {}

    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> Any:
        if self._turns is None:
            self._turns = self._taken()
        return next(self._turns)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def _taken(self) -> Iterator:
        first = self._drawn(self._most)
        rank, readers = self._begin(first)
        drawn = len(first)
        yield from first[rank::readers] if rank < readers else first[:1]
        del first
        while turn := self._drawn(readers - drawn % readers):
            ours = (rank - drawn) % readers
            drawn += len(turn)
            if rank < readers and ours < len(turn):
                yield turn[ours]
        set_state(self._state)
        self._ended(drawn)

    def _drawn(self, most: int) -> list:
        """The next batches, drawn from the stream's own random state: what the user draws in between differs by rank."""
        running = get_state()
        set_state(self._state or running)
        drawn = list(islice(self._batches, most))
        self._state = get_state()
        set_state(running)
        return drawn


def regular_sizes(loader: DataLoader) -> list[int] | None:
    """The samples in each batch of a pass over ``loader``, if known before they are drawn.

    >>> regular_sizes(DataLoader(range(5), batch_size=2)), regular_sizes(DataLoader(range(5), batch_size=2, drop_last=True))
    ([2, 2, 1], [2, 2])
    """
    batches, sampler = loader.batch_sampler, loader.sampler
    if batches is None:
        return [1] * len(sampler) if hasattr(sampler, "__len__") else None  # type: ignore[arg-type]
    if not isinstance(batches, BatchSampler) or not hasattr(batches.sampler, "__len__"):
        return None
    if type(batches) is not BatchSampler and not type(batches).__module__.startswith("torchdata."):  # may do anything
        return None
    whole, left = divmod(len(batches.sampler), batches.batch_size)  # type: ignore[arg-type]
    return [batches.batch_size] * whole + [left] * (left > 0 and not batches.drop_last)


def is_stream(loader: DataLoader) -> bool:
    """Whether there are no indices to divide."""
    return isinstance(loader.dataset, IterableDataset)


def is_endless(drawn: Any) -> bool:
    """Whether ``drawn``, or what a sampler will draw, is too much for one pass."""
    return hasattr(drawn, "__len__") and len(drawn) > MOST


def rows_of(item: Any) -> int:
    """The first dimension of a loader's item; 1 if it has none.

    >>> rows_of({"x": [torch.zeros(3, 2)]}), rows_of("text")
    (3, 1)
    """
    if isinstance(item, (torch.Tensor, np.ndarray)):
        return item.shape[0] if item.ndim else 1
    inner = item.values() if isinstance(item, dict) else item if isinstance(item, (list, tuple)) else ()
    found = (each for each in inner if isinstance(each, (torch.Tensor, np.ndarray, dict, list, tuple)))
    return next((rows_of(each) for each in found), 1)
