"""Cuts batches that were padded to a fixed length down to the longest real sequence in them.

This helps if a dataset or the user's own ``collate_fn`` pads all samples to the same maximum length. Only columns that are padding in every
tensor are cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

__all__ = ["Trimmed", "trimmed"]


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
    """``batch`` without the columns that are padding in all rows of its sequences.

    The lengths of sequences come from ``attention_mask``, if present. Otherwise they are found by ``pad_value`` at the end of the sequences
    in ``field``, or in the first integer tensor with rows and columns. All tensors of that shape are cut at the same column, if they
    contain a single value from there on.

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
    """A mask of the positions, by row and column, that are not padding."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if isinstance(mask, torch.Tensor) and mask.ndim == 2:
        return mask != 0
    if pad_value is None:
        return None
    if field is None:
        found = next((each for each in _tensors(batch) if each.ndim == 2 and not each.is_floating_point()), None)
    else:
        found = _field(batch, field)
    if not isinstance(found, torch.Tensor) or found.ndim < 2:
        return None
    real = found != pad_value
    return real.flatten(2).any(dim=2) if found.ndim > 2 else real


def _field(batch: Any, field: Any) -> Any:
    try:
        return batch[field]
    except (KeyError, IndexError, TypeError):
        return None  # the user's collate_fn has made something else


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for each in batch.values():
            yield from _tensors(each)
    elif isinstance(batch, (list, tuple)):
        for each in batch:
            yield from _tensors(each)


def _mapped(batch: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``batch`` with ``function`` applied to all tensors in it; its containers stay the same."""
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
