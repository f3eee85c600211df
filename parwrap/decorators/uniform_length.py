"""``@uniform_length``: the batches of a plain loop hold samples of similar length, with as little padding as possible.

``data/lengths.py`` has the batch sampler and the interceptor.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from parwrap.data.lengths import Lengths, UniformLength
from parwrap.decorators.scope import Call, ScopeDecorator, module_of
from parwrap.errors import UsageError
from parwrap.intercept.torch_calls import intercepting
from parwrap.options import check_positive

__all__ = ["uniform_length"]


class uniform_length(ScopeDecorator):
    """Make the shuffled loaders of a plain loop draw batches of samples with similar lengths, each padded to its longest sample.

    Write ``@uniform_length``, ``@uniform_length(pad_value=0)`` or ``with uniform_length():``, with or without ``distributed``. A shuffled
    ``DataLoader`` of samples that differ in length draws from a :class:`parwrap.UniformLengthBatchSampler`. Other loaders keep their
    order, and so do those whose samples all have one length. In every loader that makes batches, those padded to a maximum are cut to their
    longest sequence, if ``attention_mask`` or ``pad_value`` marks the padding. ``pad_collate`` replaces torch's ``default_collate``, but
    your own ``collate_fn`` is kept.

    To find the lengths, parwrap reads every sample of a shuffled loader once before the first pass, unless ``length`` is a sequence.

    Args:
        length: the length of a sample: a function of a sample, the name or position of a field in it, or a sequence of all lengths. By
            default the count in ``attention_mask``, or the length of the first tensor, array or list of numbers in a sample whose length
            differs between samples.
        pad_value: the padding value of samples or batches. Without it, only padding that ``attention_mask`` marks is cut off.
        max_tokens: the most tokens of a batch on a rank, padding included, instead of the loader's ``batch_size``.
        multiple_of: round the length of a batch up to a multiple of this.

    Raises:
        UsageError: an option is invalid. Inside the function: ``length`` does not match the samples, or a sample is longer than
            ``max_tokens``.

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
        if length is not None and not callable(length) and not isinstance(length, (str, int, Sequence, torch.Tensor, np.ndarray)):
            raise UsageError(
                f"length={length!r} does not describe the lengths of samples: pass a function that returns the length of a sample, the "
                "name or index of the field whose length counts, such as the tokens, or a sequence of all lengths."
            )
        if pad_value is not None and not isinstance(pad_value, (int, float)):
            raise UsageError(f"pad_value={pad_value!r} is not a number.")
        check_positive(multiple_of=multiple_of, **({} if max_tokens is None else {"max_tokens": max_tokens}))
        self._length, self._pad_value, self._max_tokens, self._multiple_of = length, pad_value, max_tokens, multiple_of
        self._lengths = Lengths(length, pad_value)  # they keep their state from call to call

    def scope(self, call: Call) -> AbstractContextManager[None]:
        field = self._length if isinstance(self._length, (str, int)) else None
        interceptor = UniformLength(self._lengths, self._pad_value, field, self._max_tokens, self._multiple_of)
        return intercepting([interceptor], module_of(call.function))
