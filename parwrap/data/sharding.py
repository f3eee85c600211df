"""A rank's share of a loader's indices, as samplers; nothing is drawn before it is asked for.

A plain sequential or shuffled loader gets torch's ``DistributedSampler``. Every other sampler is kept: its batches are dealt
out to the ranks in turn, or each is split among them. Loaders without end are common, so indices are never listed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sized
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

__all__ = ["DealtBatches", "SplitBatches", "distributed_sampler", "is_plain", "last_part", "share_length", "shuffles", "with_indices"]


class DealtBatches:
    """Every ``size``-th batch, from the ``rank``-th on; ranks get equally many, so the last round is filled up from the first.

    ``DistributedSampler`` fills up in the same way. Batches that are the rest of a pass have those that it began with as ``first``.

    >>> [list(DealtBatches("abcde", rank, 2)) for rank in (0, 1)]
    [['a', 'c', 'e'], ['b', 'd', 'a']]
    """

    def __init__(self, batches: Iterable, rank: int, size: int) -> None:
        self.batches, self.rank, self.size = batches, rank, size

    def __iter__(self) -> Iterator:
        first: list = getattr(self.batches, "first", [])
        turn: list = []
        for batch in self.batches:
            turn.append(batch)
            if len(turn) == self.size:
                first = first or turn
                yield turn[self.rank]
                turn = []
        if turn:
            filled = turn + (first or turn) * self.size
            yield filled[self.rank]

    def __len__(self) -> int:
        return math.ceil(len(self.batches) / self.size)  # type: ignore[arg-type]


class SplitBatches:
    """This rank's part of every batch, in order.

    ``weights`` gets, for each batch that is drawn, how much this rank's part counts in an average over ranks: its samples
    times the number of ranks over all samples. A rank for which nothing is left gets the first sample at weight 0, so that
    it takes part.

    >>> split = SplitBatches([[1, 2, 3], [4]], rank=1, size=2)
    >>> list(split), list(split.weights)
    ([[3], [4]], [0.6666666666666666, 0.0])
    """

    def __init__(self, batches: Iterable, rank: int, size: int) -> None:
        self.batches = self.within = batches
        self.rank, self.size = rank, size
        self.weights: deque[float] = deque()

    def __iter__(self) -> Iterator[list]:
        self.weights.clear()
        for batch in self.batches:
            whole = list(batch)
            small, larger = divmod(len(whole), self.size)
            start = self.rank * small + min(self.rank, larger)
            part = whole[start : start + small + (self.rank < larger)]
            self.weights.append(len(part) * self.size / len(whole))
            yield part or whole[:1]

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]


def shuffles(loader: DataLoader) -> bool:
    """Whether the order is new in every pass, which is what training loaders do."""
    return not isinstance(getattr(loader.batch_sampler, "sampler", loader.sampler), SequentialSampler)


def is_plain(loader: DataLoader) -> bool:
    """Whether each pass takes every sample once, in order or shuffled, so that ``DistributedSampler`` can do it."""
    sampler = loader.sampler
    if type(sampler) is RandomSampler:
        once = not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    else:
        once = type(sampler) is SequentialSampler
    batches: Any = loader.batch_sampler  # which some put another in the place of, to read a loader without end
    batches_by_size = batches is None or (
        loader.batch_size is not None and isinstance(batches, BatchSampler) and batches.sampler is sampler
    )
    return once and batches_by_size and len(sampler) == len(loader.dataset)  # type: ignore[arg-type]


def share_length(loader: DataLoader, whole: int, size: int) -> int:
    """How many batches one of ``size`` ranks gets of a loader that has ``whole``."""
    if loader.batch_sampler is None or not is_plain(loader):
        return math.ceil(whole / size)
    return len(BatchSampler(range(math.ceil(len(loader.dataset) / size)), loader.batch_size or 1, loader.drop_last))  # type: ignore[arg-type]


def last_part(batches: Any) -> float:
    """How full the last of a sampler's ``batches`` is: less than 1 where the samples do not fill it.

    What stands around a sampler has it as ``within``.

    >>> last_part(BatchSampler(range(10), 4, drop_last=False)), last_part(SplitBatches(BatchSampler(range(8), 4, drop_last=False), 0, 2))
    (0.5, 1.0)
    """
    while hasattr(batches, "within"):
        batches = batches.within
    if type(batches) is not BatchSampler or batches.drop_last or not hasattr(batches.sampler, "__len__"):
        return 1.0
    left = len(batches.sampler) % batches.batch_size  # type: ignore[arg-type]
    return left / batches.batch_size if left else 1.0


def with_indices(loader: DataLoader, indices: Iterable, **others: Any) -> DataLoader:
    """A shallow copy of ``loader`` that draws its batches (or samples, if it does not batch) from ``indices``.

    Everything else is kept, also of subclasses. ``DataLoader`` refuses new samplers by ``__setattr__``, hence ``vars``;
    ``copy.copy`` would leave a cache behind on the class.
    """
    shard = loader.__class__.__new__(loader.__class__)
    drawn = "batch_sampler" if loader.batch_sampler is not None else "sampler"
    vars(shard).update({**vars(loader), drawn: indices, "_iterator": None, **others})
    return shard


def distributed_sampler(loader: DataLoader, rank: int, size: int, seed: int) -> DistributedSampler:
    """torch's sampler for a loader that :func:`is_plain`."""
    dataset: Sized = loader.dataset  # type: ignore[assignment]
    return DistributedSampler(dataset, size, rank, shuffle=shuffles(loader), seed=seed)  # type: ignore[arg-type]
