"""``mean_over_ranks``: the loss of a mean over all tokens or samples of all ranks."""

from __future__ import annotations

import math

import torch

from parwrap.api import distributed
from parwrap.api.accumulate import count_batch
from parwrap.errors import UsageError
from parwrap.group.collectives import reduce_sum
from parwrap.group.group import is_alone, world_size

__all__ = ["mean_over_ranks"]


def mean_over_ranks(loss_sum: torch.Tensor, count: float | torch.Tensor) -> torch.Tensor:
    """Return a loss whose averaged gradient is that of the mean over all tokens or samples that the ranks count.

    A mean of the ranks' means would give a token on a rank with few tokens more weight than one on a rank with many. Inside
    ``parwrap.accumulate``, batches of a window are weighted by their totals too; call this once for each batch there. A loop that
    accumulates by hand gets the exact mean of each single batch.

    Args:
        loss_sum: the sum of this rank's losses; a scalar.
        count: the number of tokens or samples in it; may be 0.

    Returns:
        ``loss_sum`` times the number of ranks over the count of all ranks; 0 if nothing is counted. On one rank, the mean.

    Raises:
        UsageError: ``loss_sum`` is not a tensor with one element, or ``count`` is not a non-negative number.

    >>> mean_over_ranks(torch.tensor(6.0), 3)
    tensor(2.)
    """
    if not isinstance(loss_sum, torch.Tensor) or loss_sum.numel() != 1:
        what = f"one of shape {list(loss_sum.shape)}" if isinstance(loss_sum, torch.Tensor) else type(loss_sum).__name__
        raise UsageError(f"mean_over_ranks takes the sum of this rank's losses, a tensor with one element, not {what}.")
    number = float(count)
    if not (number >= 0 and math.isfinite(number)):
        raise UsageError(f"mean_over_ranks takes the number of tokens or samples in the sum, which cannot be negative, not {count!r}.")
    factor, total = _factor(number, loss_sum)
    count_batch(total)
    return loss_sum * factor


def _factor(count: float, loss_sum: torch.Tensor) -> tuple[float, float]:
    if is_alone() or distributed.steps_apart():
        return (1 / count if count else 0.0), count
    parts = distributed.parts()
    if parts is not None:
        return parts.counts.mean_factor(count, loss_sum)
    total = reduce_sum(count)
    return (world_size() / total if total else 0.0), total
