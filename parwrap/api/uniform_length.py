"""``@uniform_length``: the batches of a plain loop hold samples of about the same length, and are padded no further than need be.

Checks the options and opens the interceptor, ``data/lengths/uniform_length.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from parwrap.data.lengths.sample_lengths import Lengths
from parwrap.data.lengths.uniform_length import UniformLength
from parwrap.errors import UsageError
from parwrap.session.feature_scope import FeatureDecorator

__all__ = ["uniform_length"]


class uniform_length(FeatureDecorator):
    """Have the shuffled loaders of a plain loop draw batches of samples of about the same length, padded to the longest of each batch.

    As ``@uniform_length``, ``@uniform_length(pad_value=0)`` or ``with uniform_length():``, with or without ``distributed``. A shuffled
    ``DataLoader`` of samples that differ in length draws from a :class:`parwrap.data.UniformLengthBatchSampler`. Other loaders keep their
    order, and so do those whose samples are all of one length. In all of them, what is padded to a maximum is cut to the
    longest sequence of the batch, where ``attention_mask`` or ``pad_value`` tells what is padding; ``pad_collate`` stands in for torch's
    ``default_collate``; your own ``collate_fn`` is kept.

    The samples of a shuffled loader are all read once, unless ``length`` is a sequence.

    Args:
        length: how long samples are: what takes one and returns its length, the name or place of the field in it, or a sequence of the
            lengths of all. By default what ``attention_mask`` counts, or the length of the first tensor, array or list of numbers that
            differs.
        pad_value: what samples or batches are padded with. Without it, only what ``attention_mask`` tells is cut off.
        max_tokens: the most tokens of a batch on a rank, padding included, instead of the loader's ``batch_size``.
        multiple_of: what the length of a batch is rounded up to.

    Raises:
        UsageError: an option that cannot mean anything; inside: a ``length`` that does not fit the samples, or a sample that is longer
            than ``max_tokens``.

    >>> from torch.utils.data import DataLoader
    >>> @uniform_length(pad_value=0)
    ... def shapes(dataset):
    ...     return sorted(list(tokens.shape) for tokens, label in DataLoader(dataset, batch_size=2, shuffle=True))
    >>> padded = torch.tensor([[1, 2, 3, 4, 5], [6, 0, 0, 0, 0], [7, 8, 9, 8, 7], [6, 5, 0, 0, 0]])
    >>> shapes(torch.utils.data.TensorDataset(padded, torch.arange(4)))
    [[2, 2], [2, 5]]
    """

    layer = 5

    def __init__(self, *, length: Any = None, pad_value: float | None = None, max_tokens: int | None = None, multiple_of: int = 1) -> None:
        super().__init__()
        if length is not None and not callable(length) and not isinstance(length, (str, int, Sequence, torch.Tensor, np.ndarray)):
            raise UsageError(
                f"length={length!r} does not describe the lengths of samples: give a function from sample to length, the name or index "
                "of its field, or a sequence of all lengths."
            )
        if pad_value is not None and not isinstance(pad_value, (int, float)):
            raise UsageError(f"pad_value={pad_value!r} is not a number.")
        for name, value in {"max_tokens": max_tokens, "multiple_of": multiple_of}.items():
            optional = name == "max_tokens" and value is None
            if not optional and not (isinstance(value, int) and not isinstance(value, bool) and value > 0):
                raise UsageError(f"{name}={value!r} is not a whole number above 0.")
        self._length, self._pad_value, self._max_tokens, self._multiple_of = length, pad_value, max_tokens, multiple_of
        self._lengths = Lengths(length, pad_value)  # which go on from call to call

    def asked(self) -> tuple[Any, ...] | None:
        length = self._length if isinstance(self._length, (str, int, type(None))) else id(self._length)
        asked = length, self._pad_value, self._max_tokens, self._multiple_of
        return None if asked == (None, None, None, 1) else asked

    def interceptor(self) -> UniformLength:
        field = self._length if isinstance(self._length, (str, int)) else None
        return UniformLength(self._lengths, self._pad_value, field, self._max_tokens, self._multiple_of)

    def described(self) -> str:
        return "uniform_length" if self._max_tokens is None else f"uniform_length(max_tokens={self._max_tokens})"
