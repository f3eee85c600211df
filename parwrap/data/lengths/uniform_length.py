"""The interceptor that makes the loaders of a plain loop uniform in length: other batches where they are shuffled, and less padding in all.

The loader that the user has built stays as it is; a shallow copy is read instead. Whether ranks share it out is decided further on.
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
    """Exchanges the batches of shuffled loaders, and trims those of all.

    Args:
        lengths: of the samples of datasets.
        pad_value: of the padding; ``None`` if it is not known.
        field: the name or place of the sequences in a sample, if it is known.
        max_tokens: the most tokens of a batch, instead of the loader's ``batch_size``.
        multiple_of: what the length of a batch is rounded up to.
    """

    def __init__(self, lengths: Lengths, pad_value: float | None, field: Any, max_tokens: int | None, multiple_of: int) -> None:
        self._lengths, self._pad_value, self._field = lengths, pad_value, field
        self._max_tokens, self._multiple_of = max_tokens, multiple_of
        self._copies: weakref.WeakKeyDictionary[DataLoader, DataLoader] = weakref.WeakKeyDictionary()
        self._samplers: weakref.WeakKeyDictionary[DataLoader, tuple[Any, UniformLengthBatchSampler]] = weakref.WeakKeyDictionary()

    @intercepts
    def iterate(self, loader: DataLoader, original: Callable[[DataLoader], Iterator]) -> Iterator:
        """A pass over ``loader``."""
        return original(self._uniform(loader))

    @intercepts
    def length(self, loader: DataLoader, original: Callable[[DataLoader], int]) -> int:
        """``len(loader)``, which may differ where batches are counted by tokens."""
        return original(self._uniform(loader))

    def _uniform(self, loader: DataLoader) -> DataLoader:
        """The copy of ``loader`` that is read; always the same one, since what is known of a loader goes by the object."""
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
        """What draws the batches instead of the loader's own sampler; it counts on from pass to pass."""
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
        """What makes the batches: the user's own, or what pads in the place of torch's."""
        collate = loader.collate_fn
        if pads and collate is default_collate:
            collate = pad_collate(self._pad_value or 0, self._multiple_of)
        return Trimmed(collate, self._pad_value, self._multiple_of, self._field)


def _is_only_shuffled(loader: DataLoader) -> bool:
    """Whether a pass takes every sample once, in any order, so that another order is as good."""
    return (
        not isinstance(loader.dataset, IterableDataset)
        and type(loader.batch_sampler) is BatchSampler
        and is_plain(loader)
        and shuffles(loader)
    )
