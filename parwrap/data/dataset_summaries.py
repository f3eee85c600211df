"""Short summaries of the data that one rank holds, equal for equal data, for comparison with other ranks.

Nothing here knows about ranks. Large sequences are sampled, so that a summary takes about as long for a terabyte as for a megabyte; what
must be compared whole, such as the indices of a ``Subset``, is read whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from os import PathLike
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, Subset

__all__ = ["Held", "Items", "held_by", "items_of", "length_of", "summary"]

SAMPLED = 256
"""The number of sampled positions in a large sequence. Two orders of the same items differ at nearly all of them."""

DEEPEST = 4
"""The depth of nested lists to look into."""

NUMBERS = (bool, int, float, complex, np.number, np.bool_)
BUILT_IN = (list, tuple, range, dict, torch.Tensor, np.ndarray)
PLAIN = (str, bytes, PathLike, type(None), *NUMBERS)


class Held(NamedTuple):
    """An attribute that holds a sequence.

    Attributes:
        holder: a dataset or a sampler; if a list is the dataset, that list.
        name: the attribute's name; empty if the holder is the sequence.
        value: the sequence.
    """

    holder: Any
    name: str
    value: Any

    @property
    def orders(self) -> bool:
        """Whether this is an order of samples, rather than the samples themselves."""
        return isinstance(self.holder, (Sampler, Subset)) and (self.name != "dataset")

    def __str__(self) -> str:
        kind = type(self.holder).__name__
        return f"the {self.name} of a {kind}" if self.name else f"a {kind}"


def held_by(loader: DataLoader) -> list[list[Held]]:
    """The sequences behind ``loader``, for each dataset and sampler in it, including nested ones.

    >>> subset = Subset(["a", "b", "c"], [2, 0])
    >>> [[held.name for held in each] for each in held_by(DataLoader(subset))]
    [['dataset', 'indices'], [], []]
    """
    found, seen = [], set()
    waiting = [loader.dataset, loader.sampler, loader.batch_sampler]
    while waiting:
        holder = waiting.pop(0)
        if holder is None or id(holder) in seen:
            continue
        seen.add(id(holder))
        if isinstance(holder, BUILT_IN):
            found.append([Held(holder, "", holder)])
            continue
        attributes = getattr(holder, "__dict__", {})
        found.append([Held(holder, name, value) for name, value in attributes.items() if _is_sequence(value) and id(value) not in seen])
        for value in attributes.values():
            inner = value[:SAMPLED] if isinstance(value, (list, tuple)) else (value,)
            waiting += [each for each in inner if isinstance(each, (Dataset, Sampler))]
    return found


def length_of(thing: Any) -> int:
    """Its length; -1 if it has none."""
    try:
        return len(thing)
    except (TypeError, NotImplementedError):
        return -1


def _is_sequence(value: Any) -> bool:
    """Whether ``value`` has a length and an order; its items may be anything."""
    return hasattr(value, "__len__") and not isinstance(value, (str, bytes, set, frozenset, Dataset, Sampler)) and not _is_scalar(value)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim == 0


def summary(held: Held) -> str | None:
    """A short digest, equal for equal sequences; ``None`` for an opaque one, such as a table on disk.

    >>> words = Held(None, "words", ["a", "b"])
    >>> summary(words) == summary(words._replace(value=["a", "b"])), summary(words) == summary(words._replace(value=["b", "a"]))
    (True, False)
    """
    try:
        octets = _whole(held.value) if held.orders else None
        return _digest(_described(held.value) if octets is None else octets)
    except _Opaque:
        return None


class _Opaque(Exception):
    """The sequence contains an opaque object."""


def _digest(octets: bytes) -> str:
    return hashlib.blake2b(octets, digest_size=16).hexdigest()


def _whole(value: Any) -> bytes | None:
    """All bytes of a flat sequence of numbers, such as indices and weights."""
    if isinstance(value, (list, tuple, range)) and value and isinstance(value[0], (int, np.integer)):
        try:
            return np.fromiter(value, np.int64, len(value)).tobytes()
        except (TypeError, ValueError, OverflowError):
            return None
    if isinstance(value, torch.Tensor) and value.ndim == 1 and value.layout == torch.strided:
        return _octets(value)
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "biuf":
        return value.tobytes()
    return None


def _described(value: Any, depth: int = 0) -> bytes:
    """``value`` at the sampled positions."""
    if isinstance(value, PLAIN):
        return repr(value.item() if isinstance(value, np.generic) else value).encode()
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            raise _Opaque
        return f"{tuple(value.shape)}{value.dtype}".encode() + _octets(_places(value.detach()))
    if isinstance(value, np.ndarray) and value.dtype.kind != "O":
        return f"{value.shape}{value.dtype}".encode() + np.ascontiguousarray(_places(value)).tobytes()
    if isinstance(value, dict):
        value = list(value.items())
    elif isinstance(value, np.ndarray):
        value = _places(value).tolist()
    if isinstance(value, (list, tuple, range)) and depth < DEEPEST:
        step = _step(len(value))
        return b"%d(" % len(value) + b",".join(_described(each, depth + 1) for each in value[::step]) + b")"
    raise _Opaque


def _places(array: Any) -> Any:
    """About ``SAMPLED`` elements from all over a tensor or array; flattening a non-contiguous one would copy it whole."""
    contiguous = array.is_contiguous() if isinstance(array, torch.Tensor) else array.flags.c_contiguous
    if not contiguous and array.ndim:
        array = array[:: _step(len(array), SAMPLED // 8)]
    flat = array.reshape(-1)
    return flat[:: _step(len(flat))]


def _step(length: int, places: int = SAMPLED) -> int:
    return max(1, -(-length // places))


def _octets(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


class Items(NamedTuple):
    """The items of a sequence, regardless of order.

    Attributes:
        strings: equal for equal texts and paths.
        numbers: equal for equal numbers, tensors and arrays.
        has_strings: whether it has any texts or paths.
        octets: an upper bound of the bytes to send.
    """

    strings: str
    numbers: str
    has_strings: bool
    octets: int


def items_of(value: Any, most: int) -> Items | None:
    """The items of ``value``; ``None`` if any of them is not plain, or they take more than ``most`` bytes.

    >>> items_of(["a", ("b", 1)], 100) == items_of([("b", 1), "a"], 100)
    True
    >>> items_of(["a"] * 100, 100) is None, items_of([object()], 100) is None
    (True, True)
    """
    strings: list[str] = []
    numbers: list[bytes] = []
    octets = 0
    try:
        for leaf in _leaves(value):
            octets += len(leaf) + 8
            if octets > most:
                return None
            if isinstance(leaf, str):
                strings.append(leaf)
            else:
                numbers.append(leaf)
    except _Opaque:
        return None
    return Items(_digest("\0".join(sorted(strings)).encode()), _digest(b"\0".join(sorted(numbers))), bool(strings), octets)


def _leaves(value: Any, depth: int = 0) -> Iterator[str | bytes]:
    """All that ``value`` holds: texts as they are, numbers as bytes."""
    if isinstance(value, (str, PathLike)):
        yield str(value)
    elif isinstance(value, PLAIN):
        yield _described(value)
    elif isinstance(value, (torch.Tensor, np.ndarray)):
        yield from _elements(value, depth)
    elif depth > DEEPEST:
        raise _Opaque
    elif isinstance(value, dict):
        for pair in value.items():
            yield from _leaves(pair, depth + 1)
    elif isinstance(value, (list, tuple, range)):
        for each in value:
            yield from _leaves(each, depth + 1)
    else:
        raise _Opaque


def _elements(array: torch.Tensor | np.ndarray, depth: int) -> Iterator[str | bytes]:
    """The rows of a tensor or array, to compare regardless of order."""
    if isinstance(array, np.ndarray) and array.dtype.kind in "OSU":
        yield from _leaves(array.tolist(), depth)
        return
    if isinstance(array, torch.Tensor) and array.layout != torch.strided:
        raise _Opaque
    rows: Sequence = array if array.ndim else array.reshape(1)  # type: ignore[assignment]
    for row in rows:
        yield _octets(row) if isinstance(row, torch.Tensor) else np.asarray(row).tobytes()
