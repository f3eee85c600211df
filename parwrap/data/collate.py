"""Batches of sequences: ``pad_collate`` pads samples to the longest of a batch, ``trimmed`` cuts batches that are padded too far.

Trimming helps if a dataset or the script's own ``collate_fn`` pads all samples to the same maximum length. Columns at the end that are
padding in every row are cut off. A tensor with unequal values there stays whole. ``lengths.py`` decides which samples form a batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from parwrap.errors import UsageError
from parwrap.options import check_positive

__all__ = ["Trimmed", "is_sequence", "pad_collate", "trimmed"]

USUAL = {"labels": -100}
"""The padding values of fields by name, unless the user's dict has others. -100 is the index that torch's losses ignore."""


class pad_collate:
    """Make a batch of samples whose sequences differ in length, for ``DataLoader(collate_fn=...)``.

    A sample is a sequence, or a tuple, list or dict of fields. Sequences are tensors and arrays, padded along their first dimension, and
    lists of numbers, also in nested dicts, lists and tuples. ``default_collate`` handles everything else, such as labels.

    Args:
        pad_value: the padding value, or a dict from the name or position of a field to its value. A number does not apply to ``labels``,
            which are padded with -100, nor to ``attention_mask`` and ``token_type_ids``, which are padded with 0. Fields that a dict does
            not name are padded with 0, or with -100 if they are ``labels``.
        multiple_of: round the length of a batch up to a multiple of this, such as 8 for tensor cores. This applies to ``input_ids``, or
            else to the first sequence of a sample, to sequences as long as it in every sample of the batch, and to all that need padding.
        attention_mask: whether to add a mask of ones for tokens and zeros for padding. It follows ``input_ids``, or else the
            first sequence. In a dict its key is ``attention_mask``; otherwise it comes last. By default it is added to dicts that have
            ``input_ids`` and no mask.
        fields: names or positions of the sequences; detected by default.

    Raises:
        UsageError: an invalid option; in a batch: dimensions other than the first differ, or the sequences' dtype cannot hold the padding
            value.

    >>> pad_collate()([(torch.tensor([1, 2, 3]), 0), (torch.tensor([4]), 1)])
    [tensor([[1, 2, 3],
            [4, 0, 0]]), tensor([0, 1])]
    >>> pad_collate(pad_value=9)([{"input_ids": [1, 2]}, {"input_ids": [3]}])
    {'input_ids': tensor([[1, 2],
            [3, 9]]), 'attention_mask': tensor([[1, 1],
            [1, 0]])}
    """

    def __init__(
        self,
        pad_value: float | Mapping[Any, float] = 0,
        multiple_of: int = 1,
        attention_mask: bool | None = None,
        fields: Sequence[Any] | None = None,
    ) -> None:
        values = pad_value.values() if isinstance(pad_value, Mapping) else [pad_value]
        if not all(isinstance(value, (int, float)) for value in values):
            if isinstance(pad_value, (list, tuple)):
                raise UsageError("pad_collate was called with a batch: write collate_fn=pad_collate(), with parentheses.")
            raise UsageError(f"pad_value={pad_value!r} is neither a number nor a dict from field to number.")
        check_positive(multiple_of=multiple_of)
        if isinstance(fields, str):
            raise UsageError(f"fields={fields!r} is a single name: pass a list of names, such as [{fields!r}].")
        self.pad_value, self.multiple_of, self.attention_mask = pad_value, multiple_of, attention_mask
        self.fields = None if fields is None else tuple(fields)

    def __call__(self, samples: Sequence[Any]) -> Any:
        return self._collated(samples, masked=self.attention_mask)

    def _collated(self, samples: Any, masked: bool | None) -> Any:
        """Make a batch of ``samples``, or of one field's values. ``masked`` says whether to add a mask; ``None`` means the default."""
        first = samples[0]
        if is_sequence(first):
            padded = self._padded(None, samples, rounded=True)
            return [padded, _mask(samples, padded.shape[1])] if masked else padded
        if isinstance(first, Mapping):
            columns = {name: [sample[name] for sample in samples] for name in first}
        elif isinstance(first, (tuple, list)):
            columns = dict(enumerate(zip(*samples, strict=True)))  # type: ignore[arg-type]
        else:
            return default_collate(samples)
        sequences = [name for name in columns if is_sequence(columns[name][0]) and (self.fields is None or name in self.fields)]
        measure: Any = "input_ids" if "input_ids" in sequences else sequences[0] if sequences else None
        batch: dict[Any, Any] = {}
        for name, column in columns.items():
            if name in sequences:
                batch[name] = self._padded(name, column, rounded=_lengths(column) == _lengths(columns[measure]))
            elif is_sequence(column[0]):
                batch[name] = default_collate(column)
            else:
                batch[name] = self._collated(column, masked=None if masked is None else False)
        usual = isinstance(first, Mapping) and measure == "input_ids"
        if sequences and "attention_mask" not in batch and (usual if masked is None else masked):
            batch["attention_mask"] = _mask(columns[measure], batch[measure].shape[1])
        return _like(first, batch)

    def _padded(self, name: Any, column: Sequence[Any], rounded: bool) -> torch.Tensor:
        """The sequences of ``column`` in one tensor, padded to one length. Sequences of equal length are padded only if ``rounded``."""
        tensors = _tensors(column)
        shapes = {tensor.shape[1:] for tensor in tensors}
        if len(shapes) > 1:
            field = _of_field(name)
            found = " and ".join(sorted({tensor.shape[1:]: str(tuple(tensor.shape)) for tensor in tensors}.values())[:2])
            raise UsageError(
                f"{field} of a batch: shapes {found} differ beyond the first dimension, which alone can be padded. Make the "
                "other dimensions equal."
            )
        longest = max(map(len, tensors))
        if rounded or any(len(tensor) != longest for tensor in tensors):
            longest = -(-longest // self.multiple_of) * self.multiple_of
        if all(len(tensor) == longest for tensor in tensors):
            return default_collate(tensors)
        value = self._value(name)
        if not _holds(tensors[0], value):
            raise UsageError(
                f"{_of_field(name)}, of {tensors[0].dtype}, cannot be padded with {value!r}: choose another pad_value, or convert the "
                "sequences."
            )
        rest = tensors[0].new_full((longest, *shapes.pop()), value)
        return default_collate([torch.cat([tensor, rest[len(tensor) :]]) for tensor in tensors])

    def _value(self, name: Any) -> float:
        if isinstance(self.pad_value, Mapping):
            return self.pad_value.get(name, USUAL.get(name, 0))
        return 0 if name in ("attention_mask", "token_type_ids") else USUAL.get(name, self.pad_value)


def _of_field(name: Any) -> str:
    return "the samples" if name is None else f"the field {name!r}"


def is_sequence(value: Any) -> bool:
    """Whether a field is a sequence, of numbers or of rows."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.ndim > 0
    return isinstance(value, list) and all(isinstance(each, (bool, int, float, np.number)) for each in value)


def _holds(tensor: torch.Tensor, value: float) -> bool:
    """Whether the dtype of ``tensor`` can hold ``value``."""
    try:
        return tensor.is_floating_point() or tensor.new_full((), value).item() == value
    except RuntimeError:  # beyond its range
        return False


def _lengths(column: Sequence[Any]) -> list[int]:
    return [len(each) for each in column]


def _tensors(column: Sequence[Any]) -> list[torch.Tensor]:
    """``column`` as tensors of one dtype that can hold all of them. Empty lists take the dtype of the others."""
    tensors = [torch.as_tensor(each) for each in column]
    dtypes = {tensor.dtype for tensor, each in zip(tensors, column, strict=True) if not isinstance(each, list) or each}
    dtype = reduce(torch.promote_types, dtypes) if dtypes else tensors[0].dtype
    return [tensor.to(dtype) for tensor in tensors]


def _mask(column: Sequence[Any], length: int) -> torch.Tensor:
    return (torch.arange(length) < torch.tensor(_lengths(column))[:, None]).long()


def _like(sample: Any, batch: dict[Any, Any]) -> Any:
    """The fields of a ``batch`` in the container that ``default_collate`` chooses for such a ``sample``."""
    if isinstance(sample, Mapping):
        if type(sample) is dict or not isinstance(sample, MutableMapping):
            return batch
        container = copy.copy(sample)
        container.update(batch)
        return container
    return type(sample)(*batch.values()) if hasattr(sample, "_fields") and len(batch) == len(sample) else list(batch.values())


# batches that are padded too far


class Trimmed:
    """A ``collate_fn`` whose batches are trimmed.

    Args:
        collate: the function that makes a batch.
        pad_value, multiple_of: see :func:`trimmed`.
        field: the name or position of the sequences in a batch; ``None`` to search for them.
    """

    def __init__(self, collate: Callable[[list], Any], pad_value: float | None, multiple_of: int, field: Any = None) -> None:
        self.collate, self.pad_value, self.multiple_of, self.field = collate, pad_value, multiple_of, field

    def __call__(self, samples: list) -> Any:
        return trimmed(self.collate(samples), self.pad_value, self.multiple_of, self.field)


def trimmed(batch: Any, pad_value: float | None, multiple_of: int = 1, field: Any = None) -> Any:
    """``batch`` without the last columns, as far as they are padding in all rows of its sequences.

    The lengths of sequences come from ``attention_mask``, if present. Otherwise they are found by ``pad_value`` at the end of the sequences
    in ``field``, or in the first integer tensor with rows and columns. With neither a mask nor ``pad_value``, nothing is cut. All tensors
    of that shape are cut at the same column, if they contain a single value from there on. What is left has a multiple of ``multiple_of``
    columns, or all that ``batch`` had. Dicts and lists of ``batch`` are changed in place.

    >>> trimmed([torch.tensor([[5, 6, 0, 0], [7, 0, 0, 0]]), torch.tensor([0, 1])], pad_value=0)
    [tensor([[5, 6],
            [7, 0]]), tensor([0, 1])]
    """
    real = _real(batch, pad_value, field)
    if real is None or not real.numel():
        return batch
    shape = real.shape
    last = int(real.any(dim=0).nonzero().max()) + 1 if real.any() else 1
    length = min(-(-last // multiple_of) * multiple_of, shape[1])

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[:2] != shape:
            return tensor
        rest = tensor[:, length:]
        return tensor[:, :length].contiguous() if bool((rest == rest.flatten()[0]).all()) else tensor

    return batch if length == shape[1] else _mapped(batch, cut)


def _real(batch: Any, pad_value: float | None, field: Any) -> torch.Tensor | None:
    """A mask of the positions, by row and column, that are not padding; ``None`` if they cannot be found."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if isinstance(mask, torch.Tensor) and mask.ndim == 2:
        return mask != 0
    if pad_value is None:
        return None
    if field is None:
        found = next((each for each in _tensors_in(batch) if each.ndim == 2 and not each.is_floating_point()), None)
    else:
        found = _field_of(batch, field)
    if not isinstance(found, torch.Tensor) or found.ndim < 2:
        return None
    real = found != pad_value
    return real.flatten(2).any(dim=2) if found.ndim > 2 else real


def _field_of(batch: Any, field: Any) -> Any:
    try:
        return batch[field]
    except (KeyError, IndexError, TypeError):
        return None  # the user's collate_fn has made something else


def _tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for each in batch.values():
            yield from _tensors_in(each)
    elif isinstance(batch, (list, tuple)):
        for each in batch:
            yield from _tensors_in(each)


def _mapped(batch: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``batch`` with ``function`` applied to all tensors in it. Dicts and lists are changed in place."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, MutableMapping):
        for name, each in batch.items():
            batch[name] = _mapped(each, function)
    elif isinstance(batch, list):
        batch[:] = [_mapped(each, function) for each in batch]
    elif isinstance(batch, tuple):
        values = [_mapped(each, function) for each in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else tuple(values)
    return batch
