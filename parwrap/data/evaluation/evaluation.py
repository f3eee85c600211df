"""The interceptor of an exact evaluation: every pass over a loader yields this rank's part of a single process's pass.

A rank without a part stands in: it reads the first batch, so that the function runs to its end as on any other rank, and its result is
ignored. ``evaluation_blocks.py`` divides the batches, ``reported_lengths.py`` answers ``len()``, and ``merging.py`` combines the results.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from parwrap.coordination.call_site import location
from parwrap.data.dataset_summaries import Held, summary
from parwrap.data.evaluation_blocks import MOST, Blocks, Counted, Turns, block, is_endless, is_stream, regular_sizes, rows_of
from parwrap.data.passes import Pass
from parwrap.data.reported_lengths import Lengths, Share, asked_for_a_bar, asked_inside
from parwrap.data.samplers import with_indices
from parwrap.data.sharing_options import replicated
from parwrap.errors import RankMismatchError, UsageError
from parwrap.group.group import Group, is_alone
from parwrap.intercept.backward import Backward
from parwrap.intercept.interceptor import Interceptor, intercepts

__all__ = ["Evaluation", "Reading", "check", "refuse_unreadable", "refused_backward", "shared_facts"]


BOTH = (
    "a function decorated with @parwrap.evaluate both reads a DataLoader and calls another decorated function, whose result already "
    "covers all ranks: decorate only one of them."
)


@dataclass
class Reading:
    """One pass over a loader, as one rank has read it.

    Attributes:
        place: where in the user's script it began.
        in_turn: whether batches were dealt out one by one, rather than in blocks.
        batches: the batches of the whole pass; ``None`` until its end is known.
        planned: the number of them for this rank.
        read: the number of batches read.
        sizes: the samples in each of them.
        rows: the sum of the first dimensions read, if the loader does not batch; otherwise 0.
        same: a digest of what must be the same on all ranks.
        all_sizes: the samples in each batch of all ranks, if known from indices.
    """

    place: str
    in_turn: bool = False
    batches: int | None = None
    planned: int | None = None
    read: int = 0
    sizes: list[int] = field(default_factory=list)
    rows: int = 0
    same: str | None = ""
    all_sizes: list[int] | None = None


class Evaluation(Interceptor):
    """Divides what one call of a function reads.

    Args:
        group: the ranks.
        shared: a function that returns the streams that samplers draw from, the same on all ranks.
        prepare: a function, called with each loader of a dataset with indices, before it is read.
        lengths: the lengths of this rank's parts, if they are reported to the user's code.

    Attributes:
        readers: the number of ranks with a part; those above stand in.
        readings: the passes in order.
        within: whether another one has been opened inside it.
        asleep: whether it is paused.
    """

    def __init__(
        self, group: Group, shared: Callable[[], AbstractContextManager], prepare: Callable[[DataLoader], None], lengths: Lengths | None
    ) -> None:
        self._rank, self._size = group.world.rank, group.world.size
        self._shared, self._prepare, self.lengths = shared, prepare, lengths
        self.readers = self._size
        self.readings: list[Reading] = []
        self._loaders: list[DataLoader] = []
        self.within = self.asleep = False
        if lengths is not None:
            lengths.share = self._share

    @intercepts
    def iterate(self, loader: DataLoader, original: Callable[[DataLoader], Iterator]) -> Iterator:
        """A pass over this rank's part of ``loader``."""
        if self._sleeps() or loader in replicated:
            return original(loader)
        self._refuse(loader)
        reading = Reading(location())
        stream = is_stream(loader)
        if not stream:
            self._prepare(loader)
        if self.lengths is not None:
            self.lengths.note(loader)
        self.readings.append(reading)
        self._loaders.append(loader)
        if stream:
            return self._in_turn(loader, original, reading)
        batched = loader.batch_sampler is not None

        def chosen(drawn: list) -> list:
            if is_endless(drawn):
                raise _endless()
            sizes = [len(each) if batched or isinstance(each, (list, tuple)) else 1 for each in drawn]
            reading.batches, reading.all_sizes, reading.same = len(drawn), sizes, _digest(drawn)
            rank, readers = self._begin(loader, len(drawn))
            mine = block(len(drawn), rank, readers) if rank < readers else range(min(1, len(drawn)))
            reading.planned, reading.sizes = len(mine), [sizes[number] for number in mine]
            return [drawn[number] for number in mine]

        within = loader.batch_sampler if batched else loader.sampler
        with self._whole():  # workers are sent indices immediately
            batches = original(with_indices(loader, Blocks(within, self._shared, chosen)))  # type: ignore[arg-type]
        return _Read(batches, reading, None if batched else rows_of, self._whole)

    @intercepts
    def length(self, loader: DataLoader, original: Callable[[DataLoader], int]) -> int:
        """``len(loader)``: of this rank's part if lengths of parts are reported; a progress bar always gets that."""
        whole = original(loader)
        if self._sleeps() or not asked_inside():
            return whole
        if asked_for_a_bar():
            return self._share(loader).batches or whole
        return whole if self.lengths is None else self.lengths.of_loader(loader, whole)

    @intercepts
    def source(self, loader: DataLoader, name: str, source: Any) -> Any:
        """``loader.dataset`` or similar, whose length the code may ask for."""
        if self.lengths is None or self._sleeps() or not asked_inside():
            return source
        return self.lengths.of_part(loader, name, source)

    @intercepts
    def backward(self, call: Backward) -> None:
        if not self._sleeps():
            raise refused_backward()
        call.run()

    def _sleeps(self) -> bool:
        return self.asleep or get_worker_info() is not None or is_alone()

    def _whole(self) -> AbstractContextManager:
        return nullcontext() if self.lengths is None else self.lengths.whole()

    def _refuse(self, loader: DataLoader) -> None:
        if self.within:
            raise UsageError(BOTH)
        refuse_unreadable(loader)

    def _begin(self, loader: DataLoader, batches: int) -> tuple[int, int]:
        """This rank's number among the readers of a pass of at least ``batches``, and their number."""
        readers = min(self.readers, batches) or self.readers
        if readers < self.readers and any(reading.planned for reading in self.readings):
            raise UsageError(
                f"a function decorated with @parwrap.evaluate reads a DataLoader of {batches} batches on {self._size} ranks after a "
                "larger one. Some ranks have a part of the larger one but no part of this one: read the smallest loader first, or "
                "decorate one function per loader."
            )
        if self.lengths is not None:
            self.lengths.check(loader, readers)
        self.readers = readers
        return self._rank, readers

    def _in_turn(self, loader: DataLoader, original: Callable[[DataLoader], Iterator], reading: Reading) -> Iterator:
        batched = loader.batch_sampler is not None
        counted = with_indices(loader, loader.batch_sampler, collate_fn=Counted(loader.collate_fn)) if batched else loader  # type: ignore[arg-type]
        reading.in_turn = True

        def begin(first: list) -> tuple[int, int]:
            reading.same = summary(Held(None, "", first[0])) if first else ""
            rank, readers = self._begin(loader, len(first))
            reading.planned = min(1, len(first))
            return rank, readers

        def ended(batches: int) -> None:
            reading.batches = batches
            if self._rank < self.readers:
                reading.planned = len(range(self._rank, batches, self.readers))

        with self._whole():
            turns = Turns(original(counted), self._size, begin, ended)
        return _ReadInTurn(turns, reading, batched, self._whole)

    def _share(self, loader: DataLoader) -> Share:
        """This rank's part of ``loader``: of its last pass, or of the next."""
        passes = [each for each, read in zip(self.readings, self._loaders, strict=True) if read is loader and each.planned is not None]
        known = passes[-1] if passes else Reading("")
        if known.in_turn and known.batches is not None:
            return Share(known.planned, sum(known.sizes))
        sizes = known.all_sizes or (None if is_stream(loader) else regular_sizes(loader))
        if sizes is None:
            return Share(None, None)
        readers = min(self.readers, len(sizes)) or self.readers
        mine = block(len(sizes), self._rank, readers) if self._rank < readers else range(min(1, len(sizes)))
        return Share(len(mine), sum(sizes[number] for number in mine), readers)


class _Read(Pass):
    """A pass whose batches are counted in ``reading``, with their ``rows`` if needed; each is read ``within`` a context."""

    def __init__(
        self, batches: Iterator, reading: Reading, rows: Callable[[Any], int] | None, within: Callable[[], AbstractContextManager]
    ) -> None:
        super().__init__(batches, lambda exhausted: None)
        self._reading, self._rows, self._within = reading, rows, within

    def __next__(self) -> Any:
        with self._within():
            batch = super().__next__()
        self._reading.read += 1
        if self._rows is not None:
            self._reading.rows += self._rows(batch)
        return batch


class _ReadInTurn(_Read):
    """The same for a stream, whose batches come with their number of samples if the loader made them."""

    def __init__(self, batches: Iterator, reading: Reading, batched: bool, within: Callable[[], AbstractContextManager]) -> None:
        super().__init__(batches, reading, None if batched else rows_of, within)
        self._batched = batched

    def __next__(self) -> Any:
        batch = super().__next__()
        size = 1
        if self._batched:
            size, batch = batch
        self._reading.sizes.append(size)
        return batch


def check(ranks: list[list[Reading]]) -> list[list[Reading]]:
    """Check that the ranks' passes together equal those of one process, and return them.

    Raises:
        RankMismatchError: the ranks have read different things.
        UsageError: a rank did not read its part to the end.
    """
    if len({len(readings) for readings in ranks}) > 1:
        numbers = ", ".join(f"{len(readings)} on rank {rank}" for rank, readings in enumerate(ranks))
        raise RankMismatchError(f"the ranks iterated over loaders a different number of times in an evaluation: {numbers}.")
    for readings in ranks:
        for reading, first in zip(readings, ranks[0], strict=True):
            if reading.same != first.same:
                raise RankMismatchError(
                    f"the ranks drew different samples to evaluate ({reading.place}): seed the generator of the sampler or of the "
                    "stream. If a stream shards itself, let parwrap split it instead."
                )
    begun = [of_all for of_all in zip(*ranks, strict=True) if any(reading.read for reading in of_all)]
    for of_all in begun:
        for rank, reading in enumerate(of_all):
            if reading.batches is None or reading.planned is None or reading.read < reading.planned:
                of = "" if reading.in_turn else f" of its {reading.planned}"
                raise UsageError(
                    f"a pass was not read to its end in an evaluation ({reading.place}): rank {rank} read {reading.read}{of} batches, "
                    "and it is unknown which ones a single process would have read. Use a loader that contains only what you read, such "
                    "as one over a Subset."
                )
        if len({reading.batches for reading in of_all}) > 1:
            raise RankMismatchError(
                f"the ranks drew different numbers of batches to evaluate ({of_all[0].place}): "
                + ", ".join(f"{reading.batches} on rank {rank}" for rank, reading in enumerate(of_all))
            )
    return [list(readings) for readings in zip(*begun, strict=True)] or [[] for _ in ranks]


def refuse_unreadable(loader: DataLoader) -> None:
    """Raise :class:`UsageError` for a loader that the ranks cannot read once, together."""
    sampler = loader.sampler
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        raise UsageError(
            f"an evaluated DataLoader has its own DistributedSampler, for {sampler.num_replicas} replicas, which repeats or drops "
            "samples: remove it, because @parwrap.evaluate divides the samples itself and uses each one once."
        )
    if not is_stream(loader) and is_endless(sampler if loader.batch_sampler is None else loader.batch_sampler):
        raise _endless()


def refused_backward() -> UsageError:
    """The error of a function that trains."""
    return UsageError(
        "backward() was called inside a function decorated with @parwrap.evaluate, where ranks read different numbers of batches: train "
        "outside of it, or remove the decorator. For the gradient of an input, use torch.autograd.grad."
    )


def shared_facts(reading: Reading) -> Reading:
    """The data that the other ranks need about it."""
    return replace(reading, all_sizes=None)


def _endless() -> UsageError:
    return UsageError(f"a loader has more than {MOST} batches, and an evaluation reads it to its end: use a sampler that ends.")


def _digest(drawn: list) -> str:
    octets = hashlib.blake2b(digest_size=16)
    for each in drawn:
        octets.update(repr(each).encode())
    return octets.hexdigest()
