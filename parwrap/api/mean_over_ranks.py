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
    """A loss whose gradient, after ``backward`` has averaged it over the ranks, is that of the mean over all that they count.

    The mean of each rank's mean would give a token of a rank with few tokens more weight than one of a rank with many. Inside
    ``parwrap.accumulate`` the batches of a window are weighted by their totals too; there, call it once for each batch. A loop that
    accumulates by hand gets the exact mean of each single batch.

    Args:
        loss_sum: the sum of this rank's losses; a scalar.
        count: the number of tokens or samples in it; may be 0.

    Returns:
        ``loss_sum`` times the number of ranks over the count of all ranks; 0 if nothing is counted. On one rank, the mean.

    Raises:
        UsageError: ``loss_sum`` is no scalar tensor, or ``count`` no number from 0.

    >>> mean_over_ranks(torch.tensor(6.0), 3)
    tensor(2.)
    """
    if not isinstance(loss_sum, torch.Tensor) or loss_sum.numel() != 1:
        what = f"one of shape {list(loss_sum.shape)}" if isinstance(loss_sum, torch.Tensor) else type(loss_sum).__name__
        raise UsageError(f"mean_over_ranks takes the sum of this rank's losses, a tensor with one element, not {what}.")
    number = float(count)
    if not (number >= 0 and math.isfinite(number)):
        raise UsageError(f"mean_over_ranks takes the number of tokens or samples in the sum, from 0, not {count!r}.")
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
