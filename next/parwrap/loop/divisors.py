"""Classification losses with ``batch="global"`` whose divisor is not the number of samples: class weights, ignored targets.

Each mean loss is multiplied by the factor that makes the average over ranks the mean over the whole batch. That takes one message of two
numbers for each such loss, sent whenever it has class weights or several targets a sample, or when targets may be ignored.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from parwrap.intercept.interceptor import Interceptor
from parwrap.intercept.torch_calls import Criterion
from parwrap.loop.losses import leading_sizes
from parwrap.loop.passes import Passes
from parwrap.options import Options
from parwrap.ranks.group import Group, is_alone

__all__ = ["Divisors"]

LEAST = 1e-30
"""If no rank counts a target, the loss is zero."""


class Divisors(Interceptor):
    """Weights such losses by their divisors.

    Args:
        group: the process group.
        passes: the open passes, which know the weight of this rank's part of the batch.
        options: a function that returns the options of the innermost running function.
    """

    def __init__(self, group: Group, passes: Passes, options: Callable[[], Options]) -> None:
        self._group, self._passes, self._options = group, passes, options

    def criterion(self, call: Criterion) -> torch.Tensor | None:
        """The factor of ``call``'s loss. The strategy multiplies the whole loss by the weight of the batch, so it is divided by that."""
        if self._options().batch != "global" or is_alone() or not self._passes.in_weighted_batch:
            return None
        weight = self._passes.batch(lambda: leading_sizes([call.loss])).weight
        counted = call.divisor()
        call.loss.data.masked_fill_(counted == 0, 0)  # a mean over no targets is nan, and counts nothing here
        divisor = counted.to(torch.float32) * bool(weight)
        total = divisor.to("cpu", copy=True) if self._group.control is not None else divisor.clone()
        with self._group.control_message("a cross entropy of a global batch"):
            dist.all_reduce(total, group=self._group.control)
        factor = divisor * self._group.world.size / total.to(divisor).clamp(min=LEAST)
        return factor / weight if weight else torch.zeros_like(factor)
