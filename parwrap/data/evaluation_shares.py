"""Which batches of an evaluation each rank reads, so that together they read each sample once (contract, rule 9).

If batches are made of indices, each rank reads a block of consecutive batches, so that the ranks' results in order are those of one
process. The end of a stream is unknown, so the ranks take its batches in turn. Batches are those of one process and are never cut. A rank
without a part stands in: it reads the first batch, so that the function runs to its end there too, and its result is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from inspect import unwrap
from itertools import islice
from operator import length_hint
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from parwrap.data.samplers import block, copied_with, drawing_with, draws_of
from parwrap.errors import RankMismatchError, UsageError, counted
from parwrap.intercept.intercepted_calls import Backward, Batches
from parwrap.intercept.interceptor import Interceptor
from parwrap.loop.random_streams import get_states, set_states, states_kept
from parwrap.places import script_place
from parwrap.ranks.agreement import first_other
from parwrap.ranks.group import is_alone

__all__ = ["Evaluation", "Reading", "check", "reads_and_calls", "rows_of"]

MOST = 10**7
"""The most batches of one pass. A sampler that yields more counts as endless."""


class Blocks:
    """A sampler that draws everything from ``within`` at once and yields the part of it that ``chosen`` returns.

    >>> list(Blocks([[0, 1], [2, 3], [4]], lambda drawn: drawn[1:]))
    [[2, 3], [4]]
    """

    def __init__(self, within: Iterable, chosen: Callable[[list], list]) -> None:
        self.within, self._chosen = within, chosen

    def __iter__(self) -> Iterator:
        yield from self._chosen(list(islice(self.within, MOST + 1)))  # at the first next, as torch's samplers draw


class Counted(NamedTuple):
    """A ``collate_fn`` that also returns how many samples are in the batch that ``collate`` makes."""

    collate: Callable[[list], Any]

    def __call__(self, samples: list) -> tuple[int, Any]:
        return len(samples), self.collate(samples)


class Failed(NamedTuple):
    """Stands for a batch that could not be read."""

    error: Exception


class Turns:
    """Every ``readers``-th batch of a stream, from the ``rank``-th on; all ranks draw the whole stream.

    A rank that gets no turn before the end yields the first batch.

    Args:
        batches: the stream.
        most: the number of ranks.
        begin: a function, called with the first batches, at most ``most``; returns ``rank`` and ``readers``.
        ended: a function, called with the number of batches when the stream has ended.

    >>> list(Turns(iter("abcde"), 2, lambda first: (1, 2), print))
    5
    ['b', 'd']
    """

    def __init__(self, batches: Iterator, most: int, begin: Callable[[list], tuple[int, int]], ended: Callable[[int], None]) -> None:
        self._batches, self._most, self._begin, self._ended = batches, most, begin, ended
        self._states: Any = None

    def __iter__(self) -> Iterator:
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
        set_states(self._states)
        self._ended(drawn)

    def _drawn(self, most: int) -> list:
        """At most ``most`` next batches, drawn with random states kept for the stream: the script's own draws differ between ranks."""
        with states_kept():
            if self._states is not None:
                set_states(self._states)
            drawn: list[Any] = []
            while len(drawn) < most:
                try:
                    drawn.append(next(self._batches))
                except StopIteration:
                    break
                except Exception as error:  # the rank whose turn it is raises it
                    drawn.append(Failed(error))
            self._states = get_states()
        return drawn


@dataclass
class Reading:
    """One pass over a loader, as one rank has read it.

    Attributes:
        place: the line of the script where it began.
        in_turn: whether batches were dealt out one by one, rather than in blocks.
        batches: the number of batches of the whole pass; ``None`` until its end is known.
        planned: the number of batches that this rank has to read; ``None`` until it is known.
        read: the number of batches that this rank has read.
        failed: the number of batches that raised an error when this rank read them.
        sizes: the number of samples in each of this rank's batches.
        rows: the sum of the first dimensions of the items read, if the loader does not batch; otherwise 0.
        same: a digest of what must be the same on all ranks.
    """

    place: str
    in_turn: bool = False
    batches: int | None = None
    planned: int | None = None
    read: int = 0
    failed: int = 0
    sizes: list[int] = field(default_factory=list)
    rows: int = 0
    same: str = ""


class Evaluation(Interceptor):
    """Divides what one call of a function reads among the ranks.

    Args:
        rank: this rank.
        size: the number of ranks.
        begins: called with the loader when a pass begins, on all ranks.
        divides: whether each rank reads a part; otherwise it reads everything.

    Attributes:
        readers: the number of ranks with a part; ranks from this number on stand in.
        readings: the passes in order.
        within: whether another evaluation has run inside this one.
        asleep: whether another evaluation runs inside this one now.
    """

    def __init__(self, rank: int, size: int, begins: Callable[[DataLoader], None], divides: bool = True) -> None:
        self._rank, self._size, self._begins, self._divides = rank, size, begins, divides
        self.readers = size
        self.readings: list[Reading] = []
        self.within = self.asleep = False

    @property
    def stands_in(self) -> bool:
        """Whether this rank has no part."""
        return self._divides and self._rank >= self.readers

    def iterate(self, loader: DataLoader, original: Callable[[DataLoader], Iterator]) -> Iterator:
        original = unwrap(original)  # torch's own: what this loader's passes train on is not asked
        if get_worker_info() is not None or is_alone() or self.asleep:
            return original(loader)
        if self.within:
            raise reads_and_calls()
        _refuse_unreadable(loader)
        self._begins(loader)
        reading = Reading(str(script_place()))
        self.readings.append(reading)
        if not self._divides:
            return _Read(original(loader), reading)
        if isinstance(loader.dataset, IterableDataset):
            return self._in_turn(loader, original, reading)
        return self._block(loader, original, reading)

    def _block(self, loader: DataLoader, original: Callable[[DataLoader], Iterator], reading: Reading) -> Iterator:
        batched = loader.batch_sampler is not None

        def chosen(drawn: list) -> list:
            if len(drawn) > MOST:
                raise _endless()
            sizes = [len(each) if batched or isinstance(each, (list, tuple)) else 1 for each in drawn]
            reading.batches, reading.same = len(drawn), _digest(drawn)
            readers = self._begin(len(drawn))
            mine = block(len(drawn), self._rank, readers) if self._rank < readers else range(min(1, len(drawn)))
            reading.planned, reading.sizes = len(mine), [sizes[number] for number in mine]
            return [drawn[number] for number in mine]

        batches = original(drawing_with(loader, Blocks(draws_of(loader), chosen)))
        return _Read(batches, reading, length=lambda: self._share_length(loader), rows=not batched)

    def _in_turn(self, loader: DataLoader, original: Callable[[DataLoader], Iterator], reading: Reading) -> Iterator:
        batched = loader.batch_sampler is not None
        copy = copied_with(loader, collate_fn=Counted(loader.collate_fn)) if batched else loader
        reading.in_turn = True

        def begin(first: list) -> tuple[int, int]:
            readers = self._begin(len(first))
            reading.planned = min(1, len(first))
            return self._rank, readers

        def ended(batches: int) -> None:
            reading.batches = batches
            if self._rank < self.readers:
                reading.planned = len(range(self._rank, batches, self.readers))

        batches = original(copy)
        turns = iter(Turns(batches, self._size, begin, ended))
        return _Read(batches, reading, turns, rows=not batched)

    def length(self, loader: DataLoader, original: Callable[[DataLoader], int]) -> int:
        """The number of batches of all ranks together."""
        return unwrap(original)(loader)

    def _share_length(self, loader: DataLoader) -> int:
        """The number of batches of ``loader`` that this rank reads in a pass."""
        whole = len(loader)
        readers = min(self.readers, whole) or self.readers
        return len(block(whole, self._rank, readers)) if self._rank < readers else min(1, whole)

    def backward(self, call: Backward) -> None:
        if self.asleep or is_alone():
            call.run()
            return
        raise UsageError(
            f"{script_place()} calls backward inside a function decorated with @parwrap.evaluate, where ranks read different numbers of "
            "batches: train outside of that function, or remove the decorator. For the gradient of an input, use torch.autograd.grad."
        )

    def update_metric(self, metric: Any, update: Callable[[], Any]) -> Any:
        """Run ``update``, except on a rank without a part: its one batch keeps it in step, and torchmetrics would count that too."""
        return None if self.stands_in and not self.asleep else update()

    def _begin(self, batches: int) -> int:
        """Set and return the number of ranks that have a part of a pass with at least ``batches`` batches."""
        readers = min(self.readers, batches) or self.readers
        if readers < self.readers and any(reading.planned for reading in self.readings):
            raise UsageError(
                f"{script_place()} evaluates a DataLoader of {counted(batches, 'batch')} on {self._size} ranks, after a larger one in the "
                "same function. Some ranks have a part of the larger loader, but no batch of this one: read the smallest loader first, or "
                "decorate one function per loader."
            )
        self.readers = readers
        return readers


class _Read(Batches):
    """Notes in ``reading`` what the script reads.

    Args:
        batches: torch's iterator.
        reading: the pass.
        source: where to take batches from; by default ``batches``.
        length: the number of batches; by default that of ``batches``.
        rows: whether to count the rows of the batches, because the loader makes none. Else those taken in turn are of :class:`Counted`.
    """

    def __init__(
        self,
        batches: Iterator,
        reading: Reading,
        source: Iterator | None = None,
        length: Callable[[], int] | None = None,
        rows: bool = False,
    ) -> None:
        super().__init__(batches)
        self._reading, self._source, self._length, self._rows = reading, source or batches, length, rows

    def __next__(self) -> Any:
        reading = self._reading
        try:
            batch = next(self._source)
            if type(batch) is Failed:
                raise batch.error
        except StopIteration:
            raise
        except Exception:  # the script may read on
            reading.failed += 1
            if reading.in_turn:  # the batch had this rank's turn
                reading.sizes.append(0)
            else:
                del reading.sizes[reading.read : reading.read + 1]
            raise
        reading.read += 1
        if reading.in_turn:
            size, batch = (1, batch) if self._rows else batch
            reading.sizes.append(size)
        if self._rows:
            reading.rows += rows_of(batch)
        return batch

    def __len__(self) -> int:
        return super().__len__() if self._length is None else self._length()


def check(ranks: list[list[Reading]]) -> list[list[Reading]]:
    """Check that the ranks' passes together equal those of one process, and return them without passes that no rank has read.

    ``ranks`` has the passes of each rank, in order.

    Raises:
        RankMismatchError: the ranks have read different things.
        UsageError: a rank did not read its part to the end.
    """
    if len({len(readings) for readings in ranks}) > 1:
        numbers = _different([len(readings) for readings in ranks])
        raise RankMismatchError(
            f"the ranks iterated over loaders a different number of times in an evaluation: {numbers}. Read the same loaders on every rank."
        )
    begun = [of_all for of_all in zip(*ranks, strict=True) if any(reading.read for reading in of_all)]
    for of_all in begun:
        place = of_all[0].place
        if len({reading.same for reading in of_all}) > 1:
            raise RankMismatchError(
                f"the ranks drew different samples to evaluate at {place}: seed the generator of the sampler alike on all ranks."
            )
        for rank, reading in enumerate(of_all):
            if reading.batches is None or reading.planned is None or reading.read + reading.failed < reading.planned:
                of = "" if reading.in_turn else f" of its {reading.planned}"
                raise UsageError(
                    f"a pass was not read to its end in an evaluation at {place}: rank {rank} read {reading.read}{of} batches, "
                    "and it is unknown which ones a single process would have read. Use a loader that contains only what you read, such "
                    "as one over a Subset."
                )
        if len({reading.batches for reading in of_all}) > 1:
            numbers = _different([reading.batches for reading in of_all])
            raise RankMismatchError(
                f"the ranks drew different numbers of batches to evaluate at {place}: {numbers}. Let the sampler draw the same batches on "
                "every rank: seed it alike."
            )
    return [list(readings) for readings in zip(*begun, strict=True)] or [[] for _ in ranks]


def _different(of_each: list[Any]) -> str:
    """The number of rank 0, and that of the first rank that has another.

    >>> _different([4, 4, 5, 6])
    '4 on rank 0 and 5 on rank 2'
    """
    rank, other = first_other(of_each)
    return f"{of_each[0]} on rank 0 and {other} on rank {rank}"


def _refuse_unreadable(loader: DataLoader) -> None:
    """Raise :class:`UsageError` for a loader whose samples the ranks together cannot read exactly once."""
    sampler = loader.sampler
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        raise UsageError(
            f"{script_place()} evaluates a DataLoader that has its own DistributedSampler, for {sampler.num_replicas} replicas. "
            "@parwrap.evaluate divides the samples itself, and uses each one once: remove that sampler."
        )
    if not isinstance(loader.dataset, IterableDataset) and length_hint(draws_of(loader)) > MOST:
        raise _endless()


def _endless() -> UsageError:
    return UsageError(
        f"the loader at {script_place()} has more than {MOST} batches, and an evaluation reads it to its end: use a sampler that ends."
    )


def reads_and_calls() -> UsageError:
    """The error of an evaluation that reads a loader and has another evaluation inside it."""
    return UsageError(
        f"at {script_place()}, a function decorated with @parwrap.evaluate both reads a DataLoader and calls another decorated function, "
        "whose result already covers all ranks: decorate only one of the two."
    )


def _digest(drawn: list) -> str:
    octets = blake2b(digest_size=16)
    for each in drawn:
        octets.update(repr(each).encode())
    return octets.hexdigest()


def rows_of(item: Any) -> int:
    """The size of the first dimension of a loader's item; of a container, that of its first tensor, array or container; 1 if there is none.

    >>> rows_of({"x": [torch.zeros(3, 2)]}), rows_of("text")
    (3, 1)
    """
    if isinstance(item, (torch.Tensor, np.ndarray)):
        return item.shape[0] if item.ndim else 1
    inner = item.values() if isinstance(item, dict) else item if isinstance(item, (list, tuple)) else ()
    found = (each for each in inner if isinstance(each, (torch.Tensor, np.ndarray, dict, list, tuple)))
    return next((rows_of(each) for each in found), 1)
