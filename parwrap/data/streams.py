"""This rank's share of an ``IterableDataset``: every rank reads the whole stream and takes its own samples (contract, rule 2).

So all ranks must draw the same random numbers while they read, in workers too. If a stream divides itself by workers, the workers of each
rank together read all of it. If it divides itself by ranks, it would be divided twice, so its code sees one process. Hugging Face's
``datasets`` divides its streams itself. The parts that it makes, and the parts of a replicated stream, may differ in length;
:class:`EndsTogether` ends them together.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, get_worker_info

from parwrap.data.samplers import NOTHING, Count, DealtBatches, drawn_in, part_of, samples_in
from parwrap.errors import UsageError
from parwrap.options import Options
from parwrap.places import script_place
from parwrap.ranks.agreement import agree
from parwrap.ranks.environment import without
from parwrap.ranks.group import Group, reading_stream

__all__ = ["CollatePart", "Dealt", "EndsTogether", "Part", "part_of_stream", "was_split"]


class _OfOneProcess(IterableDataset):
    """``dataset``, whose code sees a single process: parwrap divides what it yields."""

    def __init__(self, dataset: IterableDataset) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return drawn_in(_without_ranks, self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dataset, name)  # a stateful loader asks for its state


@contextmanager
def _without_ranks() -> Iterator[None]:
    """Inside the block, environment and process group are those of a single process; asking parwrap for the rank is an error."""
    with without(("RANK", "WORLD_SIZE")), reading_stream():
        yield


class Dealt(_OfOneProcess):
    """Every ``size``-th sample of ``dataset``; all ranks get the same number.

    Args:
        dataset: the script's dataset.
        rank: this rank.
        size: the number of ranks.
        uneven: the treatment of the last samples, as in :class:`DealtBatches`.
        workers: the number of workers of the loader that reads it.

    >>> class Letters(IterableDataset):
    ...     def __iter__(self):
    ...         return iter("abcde")
    >>> list(Dealt(Letters(), 1, 2)), list(Dealt(Letters(), 1, 2, "drop"))
    (['b', 'd', 'a'], ['b', 'd'])
    >>> dealt = Dealt(Letters(), 1, 2)
    >>> list(dealt), dealt.count(1), dealt.count(2)
    (['b', 'd', 'a'], Count(samples=3, repeated=1), Count(samples=2, repeated=0))
    """

    def __init__(self, dataset: IterableDataset, rank: int, size: int, uneven: str = "pad", workers: int = 0) -> None:
        super().__init__(dataset)
        self._rank, self._size, self._uneven = rank, size, uneven
        self._read = torch.zeros(max(1, workers), 2, dtype=torch.int64)  # by each worker: samples, and whether the last one is repeated
        if workers:
            self._read.share_memory_()

    def __iter__(self) -> Iterator[Any]:
        info, samples = get_worker_info(), 0
        dealt = DealtBatches(super().__iter__(), self._rank, self._size, self._uneven)
        for sample in dealt:
            samples += 1
            yield sample
        self._read[info.id if info else 0] = torch.tensor((samples, dealt.count().repeated > 0))

    def count(self, batch_size: int) -> Count:
        """What this rank has read in the pass that has ended, in batches of ``batch_size``: a smaller last batch was dropped."""
        read = [(samples - samples % batch_size, repeats and samples % batch_size == 0) for samples, repeats in self._read.tolist()]
        return Count(*map(sum, zip(*read, strict=True)))


class _InitWorker(NamedTuple):
    """The ``worker_init_fn`` of a loader of a :class:`_OfOneProcess`: the script's ``init`` and ``collate_fn`` see the script's dataset.

    An ``init`` in torch's documentation, for example, sets the first and the last sample of the worker's dataset.
    """

    init: Callable[[int], Any] | None

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)
        if self.init is not None:
            self.init(worker)


class Part(NamedTuple):
    """This rank's part of a batch.

    Attributes:
        weight: its weight in an average over ranks.
        samples: the number of samples that were collated.
        batch: the collated samples.
    """

    weight: float
    samples: int
    batch: Any


class CollatePart(NamedTuple):
    """Collates this rank's part of the samples of a batch that all ranks read together."""

    collate: Callable[[list[Any]], Any]
    rank: int
    size: int

    def __call__(self, samples: list[Any]) -> Part:
        part, weight = part_of(samples, self.rank, self.size)
        return Part(weight, len(part), self.collate(part))


def part_of_stream(loader: DataLoader, rank: int, size: int, options: Options) -> dict[str, Any]:
    """The attributes to replace in a copy of ``loader``, which reads an ``IterableDataset``, so that it reads this rank's share.

    Where ranks divide each batch, the copy yields :class:`Part` instead of batches.

    Raises:
        UsageError: the script has split the stream by ranks, and each of its batches is to be divided among them.
    """
    divides_batches = options.batch == "global" and loader.batch_size is not None
    if was_split(loader.dataset):
        if divides_batches:
            raise UsageError(
                f'{script_place()} reads a stream that split_dataset_by_node has divided among the ranks, but batch="global" divides each '
                "batch of the whole stream. Remove the split: parwrap divides the stream."
            )
        return {}
    if _is_hugging_faces(loader.dataset) and not divides_batches:
        return {"dataset": _split_by_node(loader.dataset, rank, size)}
    if loader.batch_size is None or (options.batch != "global" and options.uneven != "join"):
        uneven = "pad" if options.uneven == "join" else options.uneven
        dataset: Any = Dealt(loader.dataset, rank, size, uneven, loader.num_workers)  # type: ignore[arg-type]
        return {"dataset": dataset, "worker_init_fn": _InitWorker(loader.worker_init_fn)}
    whole: Any = _OfOneProcess(loader.dataset)  # type: ignore[arg-type]
    together = loader.batch_size * (1 if options.batch == "global" else size)
    return {
        "dataset": whole,
        "worker_init_fn": _InitWorker(loader.worker_init_fn),
        "batch_sampler": BatchSampler(loader.sampler, together, loader.drop_last),
        "collate_fn": CollatePart(loader.collate_fn, rank, size),
    }


def was_split(dataset: Any) -> bool:
    """Whether ``dataset`` is a stream of Hugging Face's ``datasets`` that ``split_dataset_by_node`` has divided."""
    return _is_hugging_faces(dataset) and dataset._distributed is not None


def _is_hugging_faces(dataset: Any) -> bool:
    return isinstance(dataset, getattr(sys.modules.get("datasets"), "IterableDataset", ()))


def _split_by_node(dataset: Any, rank: int, size: int) -> Any:
    from datasets.distributed import split_dataset_by_node

    part = split_dataset_by_node(dataset, rank, size)
    part._epoch = dataset._epoch  # one tensor in shared memory, so that set_epoch reaches persistent workers too
    return part


class EndsTogether:
    """The batches of this rank's part of a stream, if parts differ in length: all ranks get the same number.

    Before each batch the ranks compare their numbers of samples, in one message of constant size while these are equal.

    Args:
        begin: begins to read the part of this rank.
        group: the ranks.
        uneven: with ``"pad"``, a rank that has read its part begins it again; with ``"drop"``, all end with the shortest part; with
            ``"join"``, a rank that has read its part repeats its last batch with weight 0, and batches are :class:`Part`.
        repeats: called with the number of samples of each batch that a rank repeats.

    Raises:
        UsageError: one rank has no batch at all, and another has one. Every rank raises it.
    """

    def __init__(self, begin: Callable[[], Iterator[Any]], group: Group, uneven: str, repeats: Callable[[int], None]) -> None:
        self._begin, self._group, self._uneven, self._repeats = begin, group, uneven, repeats
        self._batches = begin()
        self._last, self._has_read = NOTHING, False

    def __iter__(self) -> EndsTogether:
        return self

    def __next__(self) -> Any:
        batch = NOTHING if self._has_read else next(self._batches, NOTHING)
        self._has_read = batch is NOTHING
        samples = 0 if batch is NOTHING else max(1, samples_in(batch))
        counts = agree(self._group, "the next batch of a stream", samples, lambda: samples)
        counts = counts or [samples] * self._group.world.size
        if self._last is NOTHING and any(counts) and not all(counts):
            raise UsageError(
                f"{script_place()} trains on a stream of which rank {counts.index(0)} has no batch, because the stream has fewer shards "
                "than there are ranks. Write more shards, or let parwrap divide it: remove parwrap.replicate, and do not ask for the rank "
                "in the dataset."
            )
        if not any(counts) or (self._uneven == "drop" and not all(counts)):
            self._batches = iter(())  # its workers may have read ahead, and end with it
            raise StopIteration
        if batch is NOTHING:
            batch = self._last if self._uneven == "join" else self._again()
            self._repeats(samples_in(batch))
        self._last = batch
        if self._uneven != "join":
            return batch
        return Part(samples * len(counts) / sum(counts), samples, batch)

    def _again(self) -> Any:
        """The next batch after the end of this rank's part, which begins again."""
        batch = next(self._batches, NOTHING)
        if batch is NOTHING:
            self._batches = self._begin()
            batch = next(self._batches, NOTHING)
        return batch
