"""This rank's part of an ``IterableDataset``: replaces the dataset in the copy of the loader that is iterated.

A dataset that calls ``get_worker_info()`` shards itself by workers, and sees the workers of all ranks. A dataset that asks for the number
of ranks is left unchanged, and Hugging Face datasets are split by their own library. From any other dataset, each rank reads everything and
takes its own samples.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, get_worker_info

from parwrap.data.samplers import DealtBatches
from parwrap.data.sharing_options import Sharing
from parwrap.errors import UsageError
from parwrap.loop.random_streams import seed_all
from parwrap.system.wording import counted
from parwrap.torch_private.dataloader import set_worker_info, worker_info

__all__ = ["Pick", "RankPart", "part_of", "world_size_asked"]

APART = 1_000_003
"""The distance between the worker seeds of two ranks, so that they never overlap."""

_read: list[_Place] = []
"""The worker places of the datasets that are being read in this process, the innermost last."""


def world_size_asked() -> None:
    """Called when code asks for the number of ranks: if a dataset is being read, it shards itself."""
    for place in _read[-1:]:
        place.knows_ranks = True


class _Place:
    """The result of ``get_worker_info()`` for a dataset in a worker: its place among the workers of this rank, or of all ranks.

    Numbers are assigned to the ranks in turn, so that all ranks have some work if there is less than there are workers.

    Args:
        dataset: the user's.
        rank: this rank.
        size: the number of ranks.
        own: torch's own result; ``None`` without workers.
    """

    def __init__(self, dataset: Any, rank: int, size: int, own: Any) -> None:
        self.dataset, self._rank, self._size = dataset, rank, size
        self._own = own
        self.seed = own.seed if own else 0
        self.rng, self.worker_method = getattr(own, "rng", None), getattr(own, "worker_method", None)
        self.asked = self.knows_ranks = self.of_all_ranks = False

    @property
    def id(self) -> int:
        return self._own.id * self._size + self._rank if self.of_all_ranks else self._own.id

    @property
    def num_workers(self) -> int:
        self.asked = True
        return self._own.num_workers * self._size if self.of_all_ranks else self._own.num_workers

    def spread(self) -> None:
        """Make this worker one of the workers of all ranks from now on, with separate random numbers."""
        self.of_all_ranks = True
        self.seed = (self.seed + APART * self._rank) % 2**63
        seed_all(self.seed)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Make ``get_worker_info()`` return this object inside the block, or ``None`` if this process is not a worker."""
        before = worker_info()
        set_worker_info(self if self._own else None)
        _read.append(self)
        try:
            yield
        finally:
            _read.pop()
            set_worker_info(before)


class Pick(NamedTuple):
    """Takes this rank's samples from all samples.

    Attributes:
        rank: this rank.
        size: the number of ranks.
        uneven: the treatment of samples that do not divide evenly, as in :class:`parwrap.distributed`.
        batch: the number of samples that all ranks take together, each a part of them; ``None`` to take turns.
        drop_last: whether a smaller last batch is dropped.

    >>> list(Pick(1, 2, "pad")("abcde")), list(Pick(1, 2, "join")("abcde")), list(Pick(1, 2, batch=3)("abcdef"))
    (['b', 'd', 'a'], ['b', 'd'], ['b', 'e'])
    """

    rank: int
    size: int
    uneven: str = "pad"
    batch: int | None = None
    drop_last: bool = False

    def __call__(self, samples: Iterable) -> Iterator:
        if self.batch is not None:
            return self._parts(iter(samples), self.batch)
        if self.uneven == "join":
            return islice(samples, self.rank, None, self.size)
        return iter(DealtBatches(samples, self.rank, self.size, self.uneven))

    def _parts(self, samples: Iterator, batch: int) -> Iterator:
        while whole := list(islice(samples, batch)):
            if len(whole) == batch or not self.drop_last:
                yield from whole[self.rank :: self.size]


class RankPart(IterableDataset):
    """This rank's part of ``dataset``, which a worker or the main process reads.

    Args:
        dataset: the user's.
        pick: takes this rank's samples, unless the dataset does.

    Attributes:
        shards_itself: whether the dataset shards itself, known once a sample was read in this process.
    """

    def __init__(self, dataset: IterableDataset, pick: Pick) -> None:
        self.dataset, self._pick = dataset, pick
        self.shards_itself = False
        self._place: _Place | None = None

    def begin_worker(self, init: Callable[[int], Any] | None) -> None:
        """Prepare a worker that starts: the user's ``worker_init_fn`` may shard the dataset by worker number."""
        if init is None:
            return
        place = self._new_place()
        place.spread()
        with place.shown():
            init(place.id)
        self._place = place if place.asked and not place.knows_ranks else None

    def __iter__(self) -> Iterator:
        place = self._place or self._new_place()
        samples = self._samples(place)
        first = list(islice(samples, 1))
        if place.asked and not (place.knows_ranks or place.of_all_ranks):
            place.spread()
            first, samples = [], self._samples(place)
        self.shards_itself = place.of_all_ranks or place.knows_ranks
        whole = chain(first, samples)
        yield from whole if self.shards_itself else self._pick(self._all(place, whole))

    def _new_place(self) -> _Place:
        return _Place(self.dataset, self._pick.rank, self._pick.size, get_worker_info())

    def _samples(self, place: _Place) -> Iterator:
        nothing = object()
        with place.shown():
            samples = iter(self.dataset)
        while True:
            with place.shown():
                sample = next(samples, nothing)
            if sample is nothing:
                return
            yield sample

    def _all(self, place: _Place, samples: Iterator) -> Iterator:
        for sample in samples:
            if place.asked or place.knows_ranks:
                raise UsageError(
                    f"{type(self.dataset).__name__} asks for the number of workers or ranks after it has yielded its first sample, when "
                    "parwrap already splits what it yields. Ask at the beginning of its __iter__, or pass its loader to "
                    "parwrap.replicate."
                )
            yield sample


class _InitWorker(NamedTuple):
    """The ``worker_init_fn`` of a loader of a :class:`RankPart`; ``init`` is the user's."""

    init: Callable[[int], Any] | None

    def __call__(self, number: int) -> None:
        info: Any = get_worker_info()
        part = info.dataset
        part.begin_worker(self.init)
        object.__setattr__(info, "dataset", part.dataset)  # a collate_fn may call it


def part_of(loader: DataLoader, rank: int, size: int, sharing: Sharing) -> dict[str, Any]:
    """The changes to a ``loader`` of an ``IterableDataset`` that give it the part of one rank of ``size``.

    Raises:
        UsageError: its batches would have to be split, but cannot be.
    """
    dataset: Any = loader.dataset
    if _is_hugging_faces(dataset):
        return {"dataset": dataset if dataset._distributed else _split_by_node(dataset, rank, size)}
    pick = Pick(rank, size, sharing.uneven)
    others: dict[str, Any] = {"worker_init_fn": _InitWorker(loader.worker_init_fn)}
    if size > 1 and sharing.batch == "global" and loader.batch_size is not None:
        _check_can_be_split(loader.batch_size, size, sharing)
        pick = Pick(rank, size, batch=loader.batch_size, drop_last=loader.drop_last)
        others["batch_sampler"] = BatchSampler(loader.sampler, len(range(rank, loader.batch_size, size)), loader.drop_last)
    return {**others, "dataset": RankPart(dataset, pick)}


def _check_can_be_split(batch_size: int, size: int, sharing: Sharing) -> None:
    if sharing.loss == "sum":
        raise UsageError(
            'loss="sum" with batch="global" does not work with an IterableDataset: a rank does not know how many samples the other ranks '
            "have in the last batch. Use a loss that is a mean over the batch."
        )
    if batch_size < size:
        raise UsageError(
            f'batch="global" cannot split the batches of an IterableDataset: {counted(batch_size, "sample")} for {size} ranks. Raise '
            'batch_size, or use batch="per_rank".'
        )


def _is_hugging_faces(dataset: Any) -> bool:
    library = sys.modules.get("datasets")
    return isinstance(dataset, getattr(library, "IterableDataset", ()))


def _split_by_node(dataset: Any, rank: int, size: int) -> Any:
    from datasets.distributed import split_dataset_by_node

    part = split_dataset_by_node(dataset, rank, size)
    part._epoch = dataset._epoch  # one tensor in shared memory, so that set_epoch also reaches persistent workers
    return part
