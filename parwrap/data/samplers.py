"""Samplers that draw a rank's share of a loader's indices, lazily.

A plain sequential or shuffled loader gets torch's ``DistributedSampler``. Every other sampler is kept: its batches are dealt out to the
ranks in turn, or each is split among them. Endless loaders are common, so indices are never listed.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager
from itertools import islice
from operator import length_hint
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from parwrap.errors import UsageError, counted
from parwrap.loop.one_pass import Batch
from parwrap.places import script_place
from parwrap.torch_private.dataloader import ITERATOR

__all__ = [
    "NOTHING",
    "Count",
    "DealtBatches",
    "SplitBatches",
    "batches_by_size",
    "block",
    "copied_with",
    "distributed_sampler",
    "divides_itself",
    "drawing_with",
    "drawn_in",
    "draws_of",
    "in_rounds",
    "is_plain",
    "lacks_samples",
    "part_of",
    "refuse_nothing",
    "resampled",
    "samples_in",
    "share_length",
    "shuffles",
]


NOTHING = object()
"""Stands for an item after the last one."""

DEEPEST = 20
"""How many levels of a batch to look into for the number of its samples."""

STATEFUL = "torchdata.stateful_dataloader.sampler.RandomSampler"
"""The sampler of torchdata's shuffled loaders, which is like torch's."""


class Count(NamedTuple):
    """How many samples of the dataset this rank has read in a pass.

    Attributes:
        samples: the number of samples.
        repeated: how many of them it has read only to have as many batches as the others: another rank has read them too.
    """

    samples: int
    repeated: int


class DealtBatches:
    """Every ``size``-th batch, from the ``rank``-th on; all ranks get the same number.

    If the last batches are fewer than the ranks, they are padded from the first ones (``uneven="pad"``, as ``DistributedSampler`` does),
    dropped (``"drop"``), or given to as many ranks as possible (``"join"``). With ``"join"``, the other ranks repeat a batch, and the
    weight of each batch is added to ``weights``, as in :class:`SplitBatches`.

    >>> [list(DealtBatches("abcde", rank, 2)) for rank in (0, 1)]
    [['a', 'c', 'e'], ['b', 'd', 'a']]
    >>> [list(DealtBatches("abcde", rank, 2, uneven="drop")) for rank in (0, 1)]
    [['a', 'c'], ['b', 'd']]
    >>> joined = DealtBatches([[0, 1], [2, 3], [4, 5]], rank=1, size=2, uneven="join")
    >>> list(joined), [batch.weight for batch in joined.weights]
    ([[2, 3], [4, 5]], [1.0, 0.0])
    """

    def __init__(self, batches: Iterable, rank: int, size: int, uneven: str = "pad") -> None:
        self.batches, self.rank, self.size, self.uneven = batches, rank, size, uneven
        self.weights: deque[Batch] | None = deque() if uneven == "join" else None
        self._drawn = Count(0, 0)

    def __iter__(self) -> Iterator:
        batches, first = iter(self.batches), list[Any]()
        self._drawn = Count(0, 0)
        if self.weights is not None:
            self.weights.clear()
        while turn := list(islice(batches, self.size)):
            first = first or turn
            if len(turn) == self.size:
                yield self._mine(turn)
                continue
            if self.uneven != "drop":
                yield self._mine(turn, [*turn, *first * self.size][self.rank] if self.uneven == "pad" else turn[0])
            return

    def _mine(self, turn: list, stand_in: Any = None) -> Any:
        """This rank's batch of ``turn``; ``stand_in`` if it has none."""
        repeats = self.rank >= len(turn)
        mine = stand_in if repeats else turn[self.rank]
        samples = _items(mine)
        if self.weights is not None:
            weight = 0.0 if repeats else samples * self.size / (sum(map(_items, turn)) or 1)
            self.weights.append(Batch(samples, weight))
        self._drawn = _plus(self._drawn, samples, repeats)
        return mine

    def count(self) -> Count:
        """What the loop has drawn in the last pass."""
        return _without(self._drawn, self.weights or ())

    def __len__(self) -> int:
        return in_rounds(len(self.batches), self.size, self.uneven)  # type: ignore[arg-type]


def block(samples: int, rank: int, size: int) -> range:
    """The range of numbers below ``samples`` that rank ``rank`` of ``size`` takes; ranges differ in length by at most one.

    >>> [list(block(5, rank, 2)) for rank in (0, 1)]
    [[0, 1, 2], [3, 4]]
    """
    each, more = divmod(samples, size)
    start = rank * each + min(rank, more)
    return range(start, start + each + (rank < more))


def part_of(samples: list, rank: int, size: int) -> tuple[list, float]:
    """The part of ``samples`` that rank ``rank`` of ``size`` trains on, and its weight in an average over ranks.

    The weight is the part's number of samples times the number of ranks, divided by the number of all samples. A rank without a part gets
    the first sample with weight 0, so that it joins the step.

    >>> part_of([1, 2, 3], 1, 2), part_of([4], 1, 2)
    (([3], 0.6666666666666666), ([4], 0.0))
    """
    mine = block(len(samples), rank, size)
    return samples[mine.start : mine.stop] or samples[:1], len(mine) * size / (len(samples) or 1)


class SplitBatches:
    """This rank's part of every batch, in order. For each drawn batch, the weight of its part is added to ``weights``.

    >>> split = SplitBatches([[1, 2, 3], [4]], rank=1, size=2)
    >>> list(split), [batch.weight for batch in split.weights]
    ([[3], [4]], [0.6666666666666666, 0.0])
    """

    def __init__(self, batches: Iterable, rank: int, size: int) -> None:
        self.batches = batches
        self.rank, self.size = rank, size
        self.weights: deque[Batch] = deque()
        self._drawn = Count(0, 0)

    def __iter__(self) -> Iterator[list]:
        self.weights.clear()
        self._drawn = Count(0, 0)
        for batch in self.batches:
            part, weight = part_of(list(batch), self.rank, self.size)
            self.weights.append(Batch(len(part), weight))
            self._drawn = _plus(self._drawn, len(part), not weight)
            yield part

    def count(self) -> Count:
        """What the loop has drawn in the last pass."""
        return _without(self._drawn, self.weights)

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]


def _items(batch: Any) -> int:
    """The number of indices in what a sampler has drawn: one, unless it draws batches."""
    return len(batch) if isinstance(batch, Sized) and not isinstance(batch, str) else 1


def _plus(count: Count, samples: int, repeats: bool) -> Count:
    return Count(count.samples + samples, count.repeated + samples * repeats)


def _without(count: Count, ahead: Iterable[Batch]) -> Count:
    """``count`` without the batches that torch has drawn ahead of the loop."""
    return functools.reduce(lambda left, batch: _plus(left, -batch.samples, not batch.weight), ahead, count)


def shuffles(loader: DataLoader) -> bool:
    """Whether ``loader`` reads in another order than that of its dataset, as far as its samplers show."""
    batches = loader.batch_sampler
    if batches is not None and not isinstance(batches, BatchSampler):
        return True
    return not isinstance(getattr(batches, "sampler", loader.sampler), SequentialSampler)


def is_plain(loader: DataLoader) -> bool:
    """Whether a pass over ``loader`` takes every sample once, in order or shuffled, as ``DistributedSampler`` does too."""
    sampler: Any = loader.sampler
    if type(sampler) is RandomSampler or f"{type(sampler).__module__}.{type(sampler).__name__}" == STATEFUL:
        once = not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    else:
        once = type(sampler) is SequentialSampler
    batches: Any = loader.batch_sampler  # some replace it to read a loader endlessly
    of_loader = batches is None or (loader.batch_size is not None and isinstance(batches, BatchSampler) and batches.sampler is sampler)
    return once and of_loader and len(sampler) == len(loader.dataset)  # type: ignore[arg-type]


def share_length(loader: DataLoader, whole: int, size: int, uneven: str = "pad") -> int:
    """The number of batches that each of ``size`` ranks gets from a loader with ``whole`` batches."""
    if loader.batch_size is None or not (isinstance(loader.dataset, IterableDataset) or is_plain(loader)):
        return in_rounds(whole, size, uneven)
    samples, parts = len(loader.dataset), 1  # type: ignore[arg-type]
    if isinstance(loader.dataset, IterableDataset) and loader.num_workers > 1:  # which divide the stream, as torch asks of it
        parts = loader.num_workers
    batch_size, own = loader.batch_size, [len(range(part, samples, parts)) for part in range(parts)]
    if uneven == "join":
        batch_size *= size
    else:
        own = [in_rounds(each, size, uneven) for each in own]
    return sum(len(BatchSampler(range(each), batch_size, loader.drop_last)) for each in own)


def refuse_nothing(loader: DataLoader, share: DataLoader, size: int, uneven: str) -> None:
    """Raise :class:`UsageError` if one process has a batch of ``loader``, and each of ``size`` ranks has none in its ``share``."""
    whole, own = length_hint(draws_of(loader)), length_hint(draws_of(share), 1)  # of unknown length they refuse nothing
    if own == 0 < whole:
        drops = {'uneven="pad"': 'uneven="drop" skips what does not divide evenly'} if uneven == "drop" else {}
        if loader.drop_last:
            drops["drop_last=False"] = f"drop_last=True drops a batch of fewer than {loader.batch_size} samples"
        of = f" of {counted(len(loader.dataset), 'sample')}" if is_plain(loader) else ""  # type: ignore[arg-type]
        raise UsageError(
            f"{script_place()} would train on nothing: one process reads {counted(whole, 'batch')} of this loader{of} in a pass, but each "
            f"of {size} ranks reads none, because {' and '.join(drops.values()) or 'its sampler yields none'}. Use "
            f'{" and ".join(drops) or "another sampler"}, or batch="global", which divides each batch, or start fewer ranks.'
        )


def in_rounds(pieces: int, size: int, uneven: str) -> int:
    """The number of ``pieces`` that each of ``size`` ranks gets when they are dealt out in turn."""
    return pieces // size if uneven == "drop" else math.ceil(pieces / size)


def copied_with(loader: DataLoader, **others: Any) -> DataLoader:
    """A shallow copy of ``loader`` with some attributes replaced by ``others``.

    Everything else is kept, for subclasses too, except the iterator that torch keeps. ``DataLoader.__setattr__`` refuses new samplers, so
    this sets ``vars``. ``copy.copy`` would leave a cache on the class.
    """
    copied = loader.__class__.__new__(loader.__class__)
    vars(copied).update({**vars(loader), ITERATOR: None, **others})
    return copied


def draws_of(loader: DataLoader) -> Any:
    """What draws the items of ``loader``: its batch sampler, or its sampler if it makes no batches."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def drawing_with(loader: DataLoader, draws: Any) -> DataLoader:
    """A copy of ``loader`` with ``draws`` in place of :func:`draws_of` it."""
    return copied_with(loader, **{"sampler" if loader.batch_sampler is None else "batch_sampler": draws})


def drawn_in(context: Callable[[], AbstractContextManager[Any]], items: Iterable, only_first: bool = False) -> Iterator:
    """Draw each of ``items`` inside ``context()``; or only the first one, with what ``iter`` draws.

    >>> list(drawn_in(contextlib.nullcontext, "abc"))
    ['a', 'b', 'c']
    """
    with context():
        items = iter(items)
        item = next(items, NOTHING)
    while item is not NOTHING:
        yield item
        with contextlib.nullcontext() if only_first else context():
            item = next(items, NOTHING)


def samples_in(batch: Any) -> int:
    """The number of samples in a collated ``batch``: the length of the first tensor or list in it, also in attributes of an object.

    >>> samples_in({"x": (torch.zeros(3, 2), torch.zeros(3))})
    3
    """
    for _ in range(DEEPEST):  # an attribute may lead back to its object
        if isinstance(batch, torch.Tensor):
            return batch.shape[0] if batch.dim() else 1
        if isinstance(batch, (tuple, list)):
            if not batch or not isinstance(batch[0], (torch.Tensor, tuple, list, Mapping)):
                return len(batch)
            batch = batch[0]
        elif isinstance(batch, Mapping):
            batch = next(iter(batch.values()), ())
        elif isinstance(batch, Sized) or not getattr(batch, "__dict__", None):
            return len(batch) if isinstance(batch, Sized) else 1
        else:
            batch = next(iter(vars(batch).values()))
    return 1


def lacks_samples(batch: Any, drawn: int) -> bool:
    """Whether some of ``drawn`` samples are not in the collated ``batch``, as far as its tensors and lists show.

    A tensor may have its samples in the second dimension, and a graph or a packed sequence shows them in another part of the batch.

    >>> x, y = torch.zeros(5, 2), torch.zeros(5)
    >>> lacks_samples((x, y), 6), lacks_samples((x, y), 5), lacks_samples(torch.zeros(3, 6), 6)
    (True, False, False)
    """
    if samples_in(batch) >= drawn:
        return False
    shapes = list(_shapes(batch))
    tensors = [shape for shape, is_tensor in shapes if is_tensor]
    second = all(drawn in shape[1:2] for shape in tensors)
    return bool(tensors) and not second and all(shape[0] != drawn for shape, _ in shapes)


def _shapes(batch: Any, deep: int = 0) -> Iterator[tuple[tuple[int, ...], bool]]:
    """The shapes of tensors and lists in ``batch``, each with whether it is a tensor's; without those of single numbers."""
    if deep > DEEPEST or isinstance(batch, (str, bytes)):
        return
    if isinstance(shape := getattr(batch, "shape", None), tuple):
        if shape:
            yield tuple(shape), True
        return
    if isinstance(batch, (tuple, list)):
        yield (len(batch),), False
        inside: Iterable = batch
    else:
        inside = (batch if isinstance(batch, Mapping) else getattr(batch, "__dict__", {})).values()
    for each in inside:
        yield from _shapes(each, deep + 1)


def divides_itself(sampler: Any, rank: int, size: int) -> bool:
    """Whether ``sampler`` is the script's own kind of ``DistributedSampler`` and gives each rank its share."""
    own = isinstance(sampler, DistributedSampler) and type(sampler) is not DistributedSampler
    return own and size > 1 and (sampler.rank, sampler.num_replicas) == (rank, size)


def batches_by_size(loader: DataLoader) -> bool:
    """Whether ``loader`` batches samples as they come: its batch sampler is torch's or a stateful loader's, or it has none."""
    batches = loader.batch_sampler
    made_by_loader = loader.batch_size is not None and isinstance(batches, BatchSampler) and batches.sampler is loader.sampler
    return batches is None or type(batches) is BatchSampler or made_by_loader


def resampled(loader: DataLoader, sampler: DistributedSampler) -> Any:
    """The batch sampler of ``loader`` with another ``sampler``; that sampler alone if the loader has no batches.

    >>> own = DistributedSampler(range(8), num_replicas=2, rank=1, shuffle=False)
    >>> list(resampled(DataLoader(range(8), batch_size=2), own))
    [[1, 3], [5, 7]]
    """
    batches: Any = loader.batch_sampler
    if batches is None:
        return sampler
    if batches_by_size(loader):
        return BatchSampler(sampler, batches.batch_size, batches.drop_last)
    batches = copy.copy(batches)
    batches.sampler = sampler
    return batches


def distributed_sampler(loader: DataLoader, rank: int, size: int, seed: int, uneven: str = "pad") -> DistributedSampler:
    """torch's ``DistributedSampler`` for a loader for which :func:`is_plain` is true."""
    dataset: Sized = loader.dataset  # type: ignore[assignment]
    return DistributedSampler(dataset, size, rank, shuffle=shuffles(loader), seed=seed, drop_last=uneven == "drop")  # type: ignore[arg-type]
