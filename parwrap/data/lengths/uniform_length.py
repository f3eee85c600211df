"""The interceptor that reduces padding in the loaders of a plain loop: it regroups the batches of shuffled loaders and trims all batches.

The user's loader is unchanged; a shallow copy is read instead. Whether ranks split it is decided later.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, default_collate, get_worker_info

from parwrap.data.lengths.bucketing import UniformLengthBatchSampler
from parwrap.data.lengths.padding import pad_collate
from parwrap.data.lengths.sample_lengths import Lengths
from parwrap.data.lengths.trimming import Trimmed
from parwrap.data.samplers import is_plain, read_for, shuffles, with_indices
from parwrap.intercept.interceptor import Interceptor, intercepts
from parwrap.torch_private.dataloader import ITERATOR, kept_iterator

__all__ = ["UniformLength"]


class UniformLength(Interceptor):
    """Regroups the batches of shuffled loaders, and trims the batches of all loaders.

    Args:
        lengths: the lengths of the samples of datasets.
        pad_value: the value of the padding; ``None`` if unknown.
        field: the name or position of the sequences in a sample, if known.
        max_tokens: the most tokens of a batch, instead of the loader's ``batch_size``.
        multiple_of: round the length of a batch up to a multiple of this.
    """

    def __init__(self, lengths: Lengths, pad_value: float | None, field: Any, max_tokens: int | None, multiple_of: int) -> None:
        self._lengths, self._pad_value, self._field = lengths, pad_value, field
        self._max_tokens, self._multiple_of = max_tokens, multiple_of
        self._copies: weakref.WeakKeyDictionary[DataLoader, DataLoader] = weakref.WeakKeyDictionary()
        self._samplers: weakref.WeakKeyDictionary[DataLoader, tuple[Any, UniformLengthBatchSampler]] = weakref.WeakKeyDictionary()

    @intercepts
    def iterate(self, loader: DataLoader, original: Callable[[DataLoader], Iterator]) -> Iterator:
        """Iterate over ``loader``."""
        return original(self._uniform(loader))

    @intercepts
    def length(self, loader: DataLoader, original: Callable[[DataLoader], int]) -> int:
        """Return ``len(loader)``, which may differ if ``max_tokens`` limits the batches."""
        return original(self._uniform(loader))

    def _uniform(self, loader: DataLoader) -> DataLoader:
        """The copy of ``loader`` that is read. It is always the same object, because the histories of loaders are kept by object."""
        if get_worker_info() is not None or loader.batch_sampler is None or isinstance(loader.collate_fn, Trimmed):
            return loader
        copy = self._copies.get(loader)
        if copy is None:
            copy = self._copies[loader] = with_indices(loader, loader.batch_sampler)
            read_for(copy, loader)
        only_shuffled = _is_only_shuffled(loader)
        lengths = self._lengths.of(loader) if only_shuffled else None
        others: dict[str, Any] = {ITERATOR: kept_iterator(copy)}
        if lengths is not None:
            others |= {"batch_sampler": self._sampler(loader, lengths), "batch_size": None, "drop_last": False}
        others["collate_fn"] = self._collate(loader, pads=lengths is not None or not only_shuffled)
        vars(copy).update({**vars(loader), **others})
        return copy

    def _sampler(self, loader: DataLoader, lengths: np.ndarray) -> UniformLengthBatchSampler:
        """The sampler that replaces the loader's own; it counts passes."""
        known, sampler = self._samplers.get(loader, (None, None))
        if sampler is None or known is not lengths:
            size = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
            sampler = UniformLengthBatchSampler(
                lengths,
                **(size if self._max_tokens is None else {"max_tokens": self._max_tokens}),
                seed=loader.sampler.generator,  # type: ignore[attr-defined]
                multiple_of=self._multiple_of,
            )
            self._samplers[loader] = lengths, sampler
        return sampler

    def _collate(self, loader: DataLoader, pads: bool) -> Trimmed:
        """The function that makes the batches: the user's own, or one that pads, in place of torch's."""
        collate = loader.collate_fn
        if pads and collate is default_collate:
            collate = pad_collate(self._pad_value or 0, self._multiple_of)
        return Trimmed(collate, self._pad_value, self._multiple_of, self._field)


def _is_only_shuffled(loader: DataLoader) -> bool:
    """Whether a pass reads every sample once, in random order, so that it may be reordered."""
    return (
        not isinstance(loader.dataset, IterableDataset)
        and type(loader.batch_sampler) is BatchSampler
        and is_plain(loader)
        and shuffles(loader)
    )
