"""The check that all ranks read the same data: digits of a hash of a loader, which travel with the first backward of each pass.

Ranks that split the data in different ways would read some samples twice and others never, or train on samples that others validate on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from operator import length_hint
from pathlib import PurePath
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from parwrap.errors import RankMismatchError
from parwrap.places import Place, warn

__all__ = ["NO_DATA", "Held", "compare_data", "data_digits", "different_data", "held_by"]

SPREAD = 1024
"""How many values of a tensor, array or list are compared, at equal distances."""

SHAPE, ORDER, NUMBERS, TEXTS = range(4)
WHAT = {
    SHAPE: "datasets of different lengths, batches of different sizes, different samplers, or a share on some ranks and everything on "
    "others",
    ORDER: "the samples in different orders: a split, a permutation, the seed or the epoch differs, or a rank has drawn more random "
    "numbers or read one pass more",
    NUMBERS: "different numbers at the same places of the dataset",
}

NO_DATA = (0,) * (2 * (TEXTS + 1))
"""The digits of a rank that reads nothing."""


def data_digits(loader: DataLoader, held: Held, seed: int, passes: int = 0) -> tuple[int, ...]:
    """Eight digits below 251, two for each of: shape, order, numbers and texts of what ``loader`` reads in a pass.

    Args:
        loader: the loader.
        held: the result of :func:`held_by` for this loader.
        seed: the seed of the order of the pass.
        passes: the number of passes that have begun so far.

    >>> loader, other = DataLoader(torch.arange(8.0), batch_size=2), DataLoader(torch.ones(8), batch_size=2)
    >>> data_digits(loader, held_by(loader), 0) == data_digits(loader, held_by(loader), 0)
    True
    >>> [a == b for a, b in zip(data_digits(loader, held_by(loader), 0)[::2], data_digits(other, held_by(other), 1)[::2])]
    [True, False, False, True]
    """
    dataset, batches, sampler = _parts(loader)
    shape = f"{length_hint(dataset, -1)} {loader.batch_size} {loader.drop_last} {type(batches).__name__} {type(sampler).__name__}"
    tensors = (value for _, value in sorted(_attributes(sampler).items()) if isinstance(value, torch.Tensor) and value is not dataset)
    weights = [_numbers_hash(value) for value in tensors]
    return held.digits(shape, f"{seed} {weights} {passes}")


def held_by(loader: DataLoader) -> Held:
    """Hashes of the dataset and the sampler of ``loader``. They are the same for all of its passes."""
    dataset, batches, sampler = _parts(loader)
    held = Held()
    held.add(dataset)
    for drawn in (batches, sampler):
        held.add_order(drawn, dataset)
    return held


def _parts(loader: DataLoader) -> tuple[Any, Any, Any]:
    """The dataset, the batch sampler and the sampler of ``loader``."""
    return loader.dataset, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", loader.sampler)


def compare_data(all_ranks: Sequence[Sequence[int]], place: Place) -> None:
    """Compare what the ranks read at ``place``. ``all_ranks`` has the digits of each, in the order of ranks.

    Raises:
        RankMismatchError: as :func:`different_data` says.
    """
    differ = {at // 2 for digits in all_ranks for at, (a, b) in enumerate(zip(all_ranks[0], digits, strict=True)) if a != b}
    if differ:
        different_data(differ, place)


def different_data(differ: Iterable[int], place: Place, outer: Place | None = None) -> None:
    """Say that ranks read different data at ``place``. ``differ`` has what differs, such as ``ORDER`` and ``TEXTS``.

    ``outer`` is the place of a training pass around that pass, which may have chosen what it reads.

    Raises:
        RankMismatchError: unless only texts and paths differ. These may rightly differ between nodes, so they only cause a warning.
    """
    worst = min(differ)
    if worst == TEXTS:
        warn(
            f"parwrap: {place} reads datasets that hold different texts or paths on different ranks. If these do not name the same samples "
            "in the same order, sort them: sorted(os.listdir(folder))."
        )
        return
    around = (
        f" It is inside the training pass at {outer}, of which each rank reads a share: if its items choose what to read, as a list of "
        "tasks does, write parwrap.replicate(loader) there."
        if outer
        else ""
    )
    raise RankMismatchError(
        f"the ranks have read {WHAT[worst]} in the pass at {place}.{around} All ranks must hold the same data: each reads a part of it, or "
        "all of it. Before the loop, make the same dataset, split and loader on every rank: the same files in the same order, the same "
        "batch size, and the same seed (not the clock, the process number or torch.Generator().seed()). Draw inside `with "
        "parwrap.same_draws():`. Read a loader that only rank 0 needs in a function decorated with @parwrap.rank_zero_only. If the "
        "samples, or the weights of a sampler, come from numbers of a training pass, such as each sample's loss, a rank has only those of "
        "its share. Gather them first: `torch.cat(parwrap.gather(tensor))`, or by sample `losses[torch.cat(parwrap.gather(index))] = "
        "torch.cat(parwrap.gather(new))`."
    )


class Held:
    """Hashes of the order, the numbers and the texts that a dataset and its sampler hold, a few levels deep."""

    def __init__(self) -> None:
        self.order = self.numbers = self.texts = 0

    def digits(self, shape: str, order: str = "") -> tuple[int, ...]:
        """Digits of what is held and of a description of its shape and order, as :func:`data_digits` returns them."""
        numbers = crc32(shape.encode()), crc32(f"{self.order} {order}".encode()), self.numbers, self.texts
        return tuple(digit for number in numbers for digit in (number % 251, number // 251 % 251))

    def add(self, value: Any, depth: int = 4) -> None:
        """Add a dataset, or something that it holds, up to ``depth`` levels deep."""
        if isinstance(value, (torch.Tensor, np.ndarray)):
            self.numbers = crc32(b"%d" % _numbers_hash(value), self.numbers)
        elif isinstance(value, (list, tuple, range)) and depth:
            for each in _spread(value):
                if isinstance(each, (int, float, complex, np.generic)):
                    self.numbers = crc32(repr(each).encode(), self.numbers)
                elif isinstance(each, (str, bytes, PurePath)):
                    self.texts = crc32(repr(each).encode(errors="replace"), self.texts)
                else:
                    self.add(each, depth - 1)
        elif isinstance(value, Dataset) and depth:
            for name, each in sorted(_attributes(value).items()):
                if isinstance(value, Subset) and name == "indices":
                    self._add_order(each)
                else:
                    self.add(each, depth - 1)

    def add_order(self, sampler: Any, dataset: Any) -> None:
        """Add the indices that ``sampler`` holds, such as those of a fold. Leave ``dataset`` out, which it may hold too."""
        if isinstance(sampler, (list, tuple)):
            self._add_order(sampler)
        for _, each in sorted(_attributes(sampler).items()):
            if each is not dataset and isinstance(each, (list, tuple, np.ndarray)):
                self._add_order(each)

    def _add_order(self, indices: Any) -> None:
        held = Held()
        held.add(indices)
        self.order = crc32(b"%d" % held.numbers, self.order)


def _attributes(value: Any) -> dict[str, Any]:
    return getattr(value, "__dict__", {})


def _spread(value: Sequence[Any]) -> Iterator[Any]:
    step = max(1, len(value) // SPREAD)
    return islice(value, 0, SPREAD * step, step)


def _numbers_hash(value: torch.Tensor | np.ndarray) -> int:
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_meta:
            return 0
        array = _spread_values(value.detach()).cpu().resolve_conj().resolve_neg().view(torch.uint8).numpy()
    elif value.dtype.hasobject:
        return 0
    else:
        array = _spread_values(value)
    return crc32(array.tobytes(), crc32(str(tuple(value.shape)).encode()))


def _spread_values(value: Any) -> Any:
    """The spread values of a tensor or an array, without a copy of the others: it may be a view of a large file."""
    shape = tuple(value.shape) or (1,)
    size = math.prod(shape)
    if not size:
        return value.reshape(-1)
    places = np.arange(0, size, max(1, size // SPREAD))[:SPREAD]
    return value.reshape(shape)[np.unravel_index(places, shape)]
