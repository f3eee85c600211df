"""What a rank reads of a whole batch: its own rows, where torch collates, else the whole, of which it keeps its rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, default_collate

from parwrap.ranks.group import Group
from parwrap.rows.layout import Layout, equal_parts
from parwrap.rows.tensors import Whole, as_rows

__all__ = ["OwnParts", "RowsOf", "reads_own"]


def reads_own(loader: DataLoader) -> bool:
    """Whether a rank can read its own rows of ``loader``: torch's default collate makes each row of one sample."""
    plain = loader.batch_sampler is not None and loader.collate_fn is default_collate
    return plain and not isinstance(loader.dataset, IterableDataset) and not hasattr(loader, "state_dict")


class OwnParts:
    """This rank's part of every batch of indices; all of a batch that has fewer than there are ranks.

    >>> list(OwnParts([[1, 2, 3], [4]], rank=1, size=2))
    [[3], [4]]
    """

    def __init__(self, batches: Iterable, rank: int, size: int) -> None:
        self.batches, self._rank, self._size = batches, rank, size
        self.sizes: deque[int] = deque()

    def __iter__(self) -> Iterator[list]:
        self.sizes.clear()
        for batch in self.batches:
            indices = list(batch)
            self.sizes.append(len(indices))
            yield equal_parts(len(indices), self._rank, self._size).own_of(indices) if len(indices) >= self._size else indices

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]


class RowsOf:
    """Makes rows of the batches that a rank reads.

    Args:
        whole: what is open.
        group: the process group.
        parts: draws the indices of this rank's part; ``None`` if it reads the whole batch.
        samples_in: the number of samples in a batch that was read whole.
    """

    def __init__(self, whole: Whole, group: Group, parts: OwnParts | None, samples_in: Callable[[Any], int]) -> None:
        self._whole, self._group, self._parts, self._samples_in = whole, group, parts, samples_in
        self._layouts: dict[int, Layout] = {}

    def __call__(self, batch: Any) -> Any:
        parts, between = self._parts, self._whole.between
        rows = parts.sizes.popleft() if parts is not None else self._samples_in(batch)
        if rows < between.size:
            self._whole.layout = None
            return batch
        layout = self._layouts.get(rows)
        if layout is None:
            layout = self._layouts[rows] = equal_parts(rows, between.rank, between.size)
        self._whole.layout = layout
        return self._own(batch, layout) if parts is not None else _cut(batch, layout)

    def _own(self, batch: Any, layout: Layout) -> Any:
        """Make rows of what torch has collated from this rank's samples, and gather what is no tensor."""
        if type(batch) is torch.Tensor:
            return as_rows(batch, layout)
        if isinstance(batch, (list, tuple)) and batch and all(isinstance(each, (str, bytes)) for each in batch):
            found: list[Any] = [None] * self._whole.between.size
            with self._group.control_message("the texts of a batch"):
                dist.all_gather_object(found, list(batch), group=self._group.control)
            return type(batch)(text for texts in found for text in texts)
        return _mapped(batch, lambda each: self._own(each, layout))


def _cut(batch: Any, layout: Layout) -> Any:
    """This rank's rows of what every rank has read."""
    if type(batch) is torch.Tensor:
        return as_rows(layout.own(batch).clone(), layout) if batch.ndim and batch.shape[0] == layout.n else batch
    if isinstance(batch, list) and len(batch) == layout.n and all(isinstance(each, torch.Tensor) for each in batch):
        return batch  # a tensor for each sample
    return _mapped(batch, lambda each: _cut(each, layout))


def _mapped(batch: Any, change: Callable[[Any], Any]) -> Any:
    """``batch`` with the values inside changed; texts, numbers and objects of other libraries as they are."""
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(change, batch))
    if type(batch) in (list, tuple):
        return type(batch)(map(change, batch))
    if type(batch) is dict:
        return {key: change(value) for key, value in batch.items()}
    if isinstance(batch, MutableMapping):
        for key in list(batch):
            batch[key] = change(batch[key])
        return batch
    if isinstance(batch, Mapping):
        return type(batch)({key: change(value) for key, value in batch.items()})  # type: ignore[call-arg]
    return batch
