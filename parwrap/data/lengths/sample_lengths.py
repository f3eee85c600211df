"""The lengths of a dataset's samples: given by the user, or found by reading each sample once."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from parwrap.errors import UsageError
from parwrap.loop.random_streams import get_state, set_state

__all__ = ["Lengths", "read_lengths"]


class Lengths:
    """The lengths of the samples of datasets. Each dataset is read once, and again when its number of samples has changed.

    Args:
        length, pad_value: see :func:`read_lengths`.
    """

    def __init__(self, length: Any = None, pad_value: float | None = None) -> None:
        self._length, self._pad_value = length, pad_value
        self._known: dict[int, tuple[Any, int, np.ndarray | None]] = {}

    def of(self, loader: DataLoader) -> np.ndarray | None:
        """The lengths of the samples of ``loader``; ``None`` if all are the same."""
        dataset: Any = loader.dataset
        key, samples = id(dataset), len(dataset)
        known, count, lengths = self._known.get(key, (lambda: None, -1, None))
        if known() is None or count != samples:
            lengths = read_lengths(dataset, self._length, self._pad_value)
            try:
                known = weakref.ref(dataset, lambda _: self._known.pop(key, None))
            except TypeError:  # a plain list, which its loader keeps alive
                known = weakref.ref(loader, lambda _: self._known.pop(key, None))
            self._known[key] = known, samples, lengths
        return lengths


def read_lengths(dataset: Any, length: Any = None, pad_value: float | None = None) -> np.ndarray | None:
    """The length of each sample of ``dataset``; ``None`` if all are the same.

    Args:
        dataset: a dataset with a length and indices. After it is read, the random streams are restored.
        length: a sequence of the lengths; or a function that returns the length of a sample; or the name or position of the field in a
            sample. By default the count in ``attention_mask``, or the first sequence whose length differs.
        pad_value: padding at the end of a sequence, which is not counted. Without ``length``, sequences are then searched among whole
            numbers only.

    Raises:
        UsageError: ``length`` does not fit the samples.

    >>> read_lengths([(torch.tensor([5, 6, 0]), 1), (torch.tensor([7, 0, 0]), 0)], pad_value=0)
    array([2, 1])
    """
    if isinstance(length, (Sequence, torch.Tensor, np.ndarray)) and not isinstance(length, str):
        lengths: np.ndarray | None = _given_lengths(length, len(dataset))
    else:
        before = get_state()
        try:
            lengths = _read(dataset, length, pad_value)
        finally:
            set_state(before)
    return None if lengths is None or not len(lengths) or lengths.min() == lengths.max() else lengths


def _given_lengths(lengths: Any, samples: int) -> np.ndarray:
    if len(lengths) != samples:
        raise UsageError(
            f"length= has {len(lengths)} lengths, but the dataset of a shuffled DataLoader has {samples} samples. If a script has "
            "several datasets, pass a function that takes a sample and returns its length."
        )
    return np.asarray(lengths)


def _read(dataset: Any, length: Any, pad_value: float | None) -> np.ndarray | None:
    samples = (dataset[i] for i in range(len(dataset)))
    if callable(length):
        return np.array([_number(length(sample), length) for sample in samples])
    if length is not None:
        return np.array([_real_length(_field(sample, length), pad_value) for sample in samples])
    found = [_found(sample, pad_value) for sample in samples]
    for name in found[0] if found else ():
        lengths = np.array([each.get(name, 0) for each in found])
        if lengths.min() < lengths.max():
            return lengths
    return None


def _number(value: Any, length: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise UsageError(f"length={length!r} returned {value!r} for a sample, which is not a number of tokens.") from None


def _field(sample: Any, name: Any) -> Any:
    try:
        found = sample[name]
        len(found)
    except (KeyError, IndexError, TypeError):
        raise UsageError(f"length={name!r} does not name a field with a length. Samples are of type {type(sample).__name__}.") from None
    return found


def _found(sample: Any, pad_value: float | None) -> dict[Any, int]:
    """The possible lengths of a sample, the likeliest first."""
    if isinstance(sample, Mapping):
        fields = dict(sample)
    else:
        fields = dict(enumerate(sample)) if isinstance(sample, (tuple, list)) and not _is_row(sample) else {None: sample}
    fields = {name: field for name, field in fields.items() if _is_row(field)}
    found: dict[Any, int] = {}
    if isinstance(sample, Mapping) and "attention_mask" in fields:
        found["mask"] = int(np.count_nonzero(np.asarray(fields["attention_mask"])))
    found |= {("whole", name): len(field) for name, field in fields.items()}
    whole_numbers = {name: field for name, field in fields.items() if np.asarray(field).dtype.kind in "iu"}
    if pad_value is not None:
        found |= {("real", name): _real_length(field, pad_value) for name, field in whole_numbers.items()}
    return found


def _is_row(value: Any) -> bool:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.ndim > 0
    return isinstance(value, list) and all(isinstance(each, (bool, int, float, np.number)) for each in value)


def _real_length(sequence: Any, pad_value: float | None) -> int:
    """The length of a sequence up to its last item that is not padding."""
    if pad_value is None or isinstance(sequence, str):
        return len(sequence)
    array = np.asarray(sequence)
    real = (array != pad_value).reshape(len(array), -1).any(axis=1)
    return int(real.nonzero()[0].max(initial=-1)) + 1
