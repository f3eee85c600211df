"""This rank's share of an ``IterableDataset``: every rank reads the whole stream and takes its own samples (contract, rule 2).

So all ranks must draw alike while they read, in workers too. A dataset that divides itself by rank would be divided twice: that is an
error, which ``parwrap.replicate(loader)`` avoids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, get_worker_info

from parwrap.data.samplers import DealtBatches, block
from parwrap.options import Options
from parwrap.ranks.group import reading_stream

__all__ = ["Part", "part_of_stream"]


class Dealt(IterableDataset):
    """Every ``size``-th sample of ``dataset``; all ranks get the same number.

    Args:
        dataset: the script's.
        rank: this rank.
        size: the number of ranks.
        uneven: the treatment of the last samples, as in :class:`DealtBatches`.

    >>> class Letters(IterableDataset):
    ...     def __iter__(self):
    ...         return iter("abcde")
    >>> list(Dealt(Letters(), 1, 2)), list(Dealt(Letters(), 1, 2, "drop"))
    (['b', 'd', 'a'], ['b', 'd'])
    """

    def __init__(self, dataset: IterableDataset, rank: int, size: int, uneven: str = "pad") -> None:
        self.dataset, self._rank, self._size, self._uneven = dataset, rank, size, uneven

    def __iter__(self) -> Iterator[Any]:
        return iter(DealtBatches(_guarded(self.dataset), self._rank, self._size, self._uneven))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dataset, name)  # a stateful loader asks for its state


def _guarded(dataset: IterableDataset) -> Iterator[Any]:
    """The samples of ``dataset``, whose code must not ask for the number of ranks."""
    nothing = object()
    with reading_stream():
        samples = iter(dataset)
    while True:
        with reading_stream():
            sample = next(samples, nothing)
        if sample is nothing:
            return
        yield sample


class _InitWorker(NamedTuple):
    """The ``worker_init_fn`` of a loader of a :class:`Dealt`: the script's ``init`` and ``collate_fn`` see the script's dataset.

    torch's documentation has an ``init`` that sets the first and the last sample of its dataset there.
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
        samples: its number of samples.
        batch: the collated samples.
    """

    weight: float
    samples: int
    batch: Any


class _CollatePart(NamedTuple):
    """Collates this rank's part of the samples of a batch that all ranks read together."""

    collate: Callable[[list[Any]], Any]
    rank: int
    size: int

    def __call__(self, samples: list[Any]) -> Part:
        mine = block(len(samples), self.rank, self.size)
        part = samples[mine.start : mine.stop]
        return Part(len(part) * self.size / len(samples), len(part), self.collate(part or samples[:1]))


def part_of_stream(loader: DataLoader, rank: int, size: int, options: Options) -> dict[str, Any]:
    """The attributes to replace in a copy of ``loader``, which reads an ``IterableDataset``, so that it reads this rank's share.

    Where ranks divide each batch, the copy yields :class:`Part` instead of batches.
    """
    if loader.batch_size is None or (options.batch != "global" and options.uneven != "join"):
        uneven = "pad" if options.uneven == "join" else options.uneven
        dataset: Any = Dealt(loader.dataset, rank, size, uneven)  # type: ignore[arg-type]
        return {"dataset": dataset, "worker_init_fn": _InitWorker(loader.worker_init_fn)}
    together = loader.batch_size * (1 if options.batch == "global" else size)
    return {
        "batch_sampler": BatchSampler(loader.sampler, together, loader.drop_last),
        "collate_fn": _CollatePart(loader.collate_fn, rank, size),
    }
