"""The check that all ranks read the same data: digits of a hash of a loader, which travel with the first backward of each pass.

Ranks that split data apart would read some samples twice and others never, or train on what others validate on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from parwrap.errors import RankMismatchError
from parwrap.places import Place, warn

__all__ = ["data_digits", "different_data"]

SPREAD = 1024
"""How many values of a tensor, array or list are compared, at equal distances."""

SHAPE, ORDER, NUMBERS, TEXTS = range(4)
WHAT = {
    SHAPE: "datasets of different lengths, batches of different sizes or different samplers",
    ORDER: "the samples in different orders: a split, a permutation, the seed or the epoch differs",
    NUMBERS: "different numbers at the same places of the dataset",
}


_known: WeakKeyDictionary[DataLoader, tuple[int, int, int]] = WeakKeyDictionary()
"""The hashes of what each loader reads, which are computed once."""


def data_digits(loader: DataLoader, seed: int, epoch: int) -> tuple[int, ...]:
    """Eight digits below 251, two for each of: shape, order, numbers and texts of what ``loader`` reads in a pass.

    >>> loader = DataLoader(torch.arange(8.0), batch_size=2)
    >>> data_digits(loader, 0, 0) == data_digits(DataLoader(torch.arange(8.0), batch_size=2), 0, 0)
    True
    >>> [a == b for a, b in zip(data_digits(loader, 0, 0)[::2], data_digits(DataLoader(torch.ones(8), batch_size=2), 1, 0)[::2])]
    [True, False, False, True]
    """
    dataset, sampler = loader.dataset, getattr(loader.batch_sampler, "sampler", loader.sampler)
    shape = f"{_length(dataset)} {loader.batch_size} {loader.drop_last} {type(loader.batch_sampler).__name__} {type(sampler).__name__}"
    if loader not in _known:
        _known[loader] = _held(dataset)
    order, numbers, texts = _known[loader]
    weights = [_numbers_hash(value) for _, value in sorted(vars(sampler).items()) if isinstance(value, torch.Tensor)]
    order = crc32(f"{order} {seed} {epoch} {weights}".encode())
    return tuple(digit for number in (crc32(shape.encode()), order, numbers, texts) for digit in (number % 251, number // 251 % 251))


def different_data(differ: Iterable[int], place: Place) -> None:
    """Say that ranks read different data at ``place``.

    Raises:
        RankMismatchError: unless only texts and paths differ, which is a warning: they differ rightly between nodes.
    """
    worst = min(differ)
    if worst == TEXTS:
        warn(
            f"parwrap: {place} reads datasets that hold different texts or paths on different ranks. If they do not name the same samples "
            "in the same order, sort them: sorted(os.listdir(folder))."
        )
        return
    raise RankMismatchError(
        f"the ranks have read {WHAT[worst]} in the pass at {place}. Each rank takes its share of what all ranks hold alike, so samples "
        "would be read twice or never. Make the dataset and its split before the loop, from the same files in the same order, with "
        "`with parwrap.same_draws():` around what draws it."
    )


def _held(dataset: Any) -> tuple[int, int, int]:
    """Hashes of the order, the numbers and the texts that ``dataset`` holds, one level deep."""
    order: list[int] = []
    numbers: list[int] = []
    texts: list[int] = []
    for name, value in _members(dataset):
        if isinstance(value, Dataset):
            for found, each in zip((order, numbers, texts), _held(value), strict=True):
                found.append(each)
        elif isinstance(value, (torch.Tensor, np.ndarray)) or _of(value, (int, float, complex)):
            (order if isinstance(dataset, Subset) and name == "indices" else numbers).append(_numbers_hash(value))
        elif _of(value, (str, bytes, tuple)):
            texts.append(crc32(repr(_spread(value)).encode(errors="replace")))
    return crc32(repr(order).encode()), crc32(repr(numbers).encode()), crc32(repr(texts).encode())


def _members(dataset: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(dataset, (torch.Tensor, np.ndarray, list, tuple)):
        yield "", dataset
        return
    for name, value in sorted(getattr(dataset, "__dict__", {}).items()):
        yield name, value
        if isinstance(value, (list, tuple)) and len(value) <= 100:
            for index, each in enumerate(value):
                if isinstance(each, (Dataset, torch.Tensor, np.ndarray)):
                    yield f"{name}[{index}]", each


def _of(value: Any, kinds: Any) -> bool:
    """Whether ``value`` is a list or tuple of ``kinds``, to judge by its first and last items."""
    return isinstance(value, (list, tuple, range)) and len(value) > 0 and isinstance(value[0], kinds) and isinstance(value[-1], kinds)


def _spread(value: Sequence[Any]) -> list[Any]:
    step = max(1, len(value) // SPREAD)
    return [len(value), *islice(value, 0, SPREAD * step, step)]


def _numbers_hash(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_meta:
            return 0
        flat = value.detach().reshape(-1)
        value = flat[:: max(1, len(flat) // SPREAD)][:SPREAD].contiguous().cpu()
        value = value.view(torch.uint8).numpy() if value.numel() and not value.is_complex() else value.numpy()
        return crc32(value.tobytes(), crc32(str(flat.shape).encode()))
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            return 0
        flat = value.ravel()
        return crc32(flat[:: max(1, len(flat) // SPREAD)][:SPREAD].tobytes(), crc32(str(value.shape).encode()))
    return crc32(repr(_spread(value)).encode())


def _length(dataset: Any) -> int:
    try:
        return len(dataset)
    except TypeError:
        return -1
