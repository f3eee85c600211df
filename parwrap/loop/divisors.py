"""Classification losses with ``batch="global"`` whose divisor is not the number of samples: class weights, ignored targets.

The gradient of each mean loss of a training pass is multiplied by a factor that makes the average over ranks the mean over the whole batch.
To find the factors, ranks add up the divisors of all losses that a backward reaches, in one message for one loss and two for several.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.autograd.graph import GradientEdge, Node

from parwrap.errors import RankMismatchError
from parwrap.intercept.intercepted_calls import Backward, Criterion
from parwrap.intercept.interceptor import Interceptor
from parwrap.loop.losses import counts_samples, is_counted, leading_sizes
from parwrap.loop.passes import Passes
from parwrap.options import CurrentOptions
from parwrap.places import script_place
from parwrap.ranks.group import Group, is_alone

__all__ = ["Divisors"]

LEAST = 1e-30
"""The least sum of divisors to divide by. If no rank counts a target, the loss is zero."""


class _MeanLoss:
    """A classification loss that is a mean over targets.

    Args:
        criterion: the call of the loss function.

    Attributes:
        value: the loss on this rank.
        divisor: the number by which the sum of its terms was divided.
        factor: multiplies the gradient of the loss; ``None`` until the loss is differentiated for the first time.
        again: whether a backward that keeps the graph has reached it, so that another backward may.
    """

    def __init__(self, criterion: Criterion) -> None:
        self.value, self.divisor = criterion.loss.data, criterion.divisor()
        self.factor: float | None = None
        self.again = False
        self.value.masked_fill_(self.divisor == 0, 0)  # a mean over no targets is nan, and counts nothing here


class _Weighted(torch.autograd.Function):
    """Returns a mean loss unchanged, and multiplies its gradient by the factor of :class:`_MeanLoss` in the backward."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, mean: _MeanLoss) -> torch.Tensor:
        ctx.mean = mean
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor, None]:
        if ctx.mean.factor is None:
            ctx.mean.factor = 1.0  # by torch.autograd.grad: the loss of an inner problem, such as MAML's, is this rank's
        return grads[0] * ctx.mean.factor, None


class Divisors(Interceptor):
    """Weights classification losses that are means, so that their average over ranks is the mean over the whole batch.

    Args:
        group: the process group.
        passes: the open passes.
        options: the options of the innermost running function.

    Attributes:
        waiting: the mean losses that a backward may reach, each with its node.
    """

    def __init__(self, group: Group, passes: Passes, options: CurrentOptions) -> None:
        self._group, self._passes, self._options = group, passes, options
        self.waiting: list[tuple[weakref.ref[Node], _MeanLoss]] = []

    def criterion(self, loss: torch.Tensor, mean: Callable[[], Criterion | None]) -> torch.Tensor:
        if self._options.now.batch != "global" or is_alone() or not self._passes.in_weighted_batch or (call := mean()) is None:
            return loss
        if is_counted(loss):
            return loss  # for a subclass of tensors, torch calls the function again
        mean_loss = _MeanLoss(call)
        result = cast(torch.Tensor, _Weighted.apply(loss, mean_loss))
        counts_samples(result)
        self.waiting.append((weakref.ref(cast(Node, result.grad_fn)), mean_loss))
        return result

    def weighs_criterions(self) -> bool:
        return self._options.now.batch == "global"

    def weigh(self, call: Backward) -> torch.Tensor | None:
        """Set the factors of the mean losses that ``call`` is the first to reach, without the batch's weight: the strategy applies it.

        Returns:
            What the factors add to the loss, a scalar; ``None`` if ``call`` reaches no mean loss.

        Raises:
            RankMismatchError: ``call`` reaches different numbers of mean losses on the ranks.
        """
        self.waiting = [(ref, mean) for ref, mean in self.waiting if ref() is not None and (mean.factor is None or mean.again)]
        if not self.waiting:
            return None
        edges = [GradientEdge(cast(Node, ref()), 0) for ref, _ in self.waiting]
        means = [mean for _, mean in self.waiting]
        new = [mean for mean in means if mean.factor is None]
        grads = torch.autograd.grad(cast(Any, call.tensors), edges, call.grad_tensors, retain_graph=True, allow_unused=True)
        for mean in new:
            mean.factor = None  # a loss that depends on another one was differentiated now
        reached = [(mean, grad) for mean, grad in zip(means, grads, strict=True) if grad is not None]
        if not reached:
            return None
        for mean, _ in reached:
            mean.again = call.keeps_graph
        if first := [mean for mean, _ in reached if mean.factor is None]:
            weight = self._passes.batch(lambda: leading_sizes(call.tensors)).weight
            factors = self._factors(torch.stack([mean.divisor for mean in first]).to("cpu", torch.float64), weight)
            for mean, factor in zip(first, factors, strict=True):
                mean.factor = factor
        return cast(torch.Tensor, sum(grad * mean.value * (cast(float, mean.factor) - 1) for mean, grad in reached))

    def _factors(self, divisors: torch.Tensor, weight: float) -> list[float]:
        group, count, counted = self._group, len(divisors), divisors * bool(weight)
        first, others = torch.tensor([count, count**2, counted[0]], dtype=torch.float64), counted[1:].clone()
        with group.control_message('the divisors of cross entropies in batch="global"'):
            dist.all_reduce(first, group=group.control)
            if first[0] ** 2 != first[1] * group.world.size:
                raise RankMismatchError(
                    f"the ranks compute different numbers of cross entropies in the loss at {script_place()}: {count} on this rank, and "
                    f'{first[0]:.0f} on all {group.world.size} ranks together. batch="global" averages the first cross entropies of the '
                    'ranks with each other, then their second ones, and so on. Compute equally many on each rank, or use reduction="sum" '
                    'with loss="sum" and divide by a number that all ranks share, or train with batch="per_rank".'
                )
            if count > 1:
                dist.all_reduce(others, group=group.control)
        totals = torch.cat([first[2:], others]).clamp(min=LEAST)
        return (counted * group.world.size / totals / weight).tolist() if weight else [0.0] * count
