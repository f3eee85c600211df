"""Classification losses with ``batch="global"`` whose divisor is not the number of samples: class weights, ignored targets.

The mean over a rank's part is weighted by its own divisor: its gradient gets the factor that makes the average over ranks that of the whole
batch; its value stays this rank's. Each such loss takes one collective of one number, the sum of the divisors. A loss over one target for
each sample, without weights, needs nothing.
"""

from __future__ import annotations

import torch

from parwrap.coordination.call_site import call_site, location, warn
from parwrap.group.collectives import all_reduced, sums_of
from parwrap.group.group import Group, is_alone
from parwrap.intercept.criterion import Criterion
from parwrap.intercept.interceptor import Interceptor, intercepts
from parwrap.loop.autograd_graph import leading_sizes
from parwrap.loop.batch_weights import Weighed
from parwrap.loop.loop_state import Loop
from parwrap.torch_private.modes import is_transformed

__all__ = ["Counts", "WeightedMeans"]

DIVISOR = "a cross entropy that is weighted or ignores targets"

COUNT = "parwrap.mean_over_ranks"

JUDGED = "the first cross entropy of its line"

DEFAULT = -100
"""Torch's own default of ``ignore_index``, which most losses have and few targets."""

LEAST = 1e-30
"""If no rank counts a target, the gradient is zero."""


class WeightedMeans(Interceptor):
    """Weights such losses by their divisors.

    Args:
        group: the ranks.
        loop: the loop state, which knows the batch.
    """

    def __init__(self, group: Group, loop: Loop) -> None:
        self._group, self._loop = group, loop
        self._known: dict[tuple, bool] = {}
        self._warned = False
        group.coordinator.answer(DIVISOR, lambda detail, present: self._total(torch.zeros(())))
        group.coordinator.answer(JUDGED, lambda detail, present: None)

    @intercepts
    def criterion(self, call: Criterion) -> torch.Tensor | None:
        """The factor that weights the gradient of ``call`` by its divisor, if needed. It is not divided by this rank's weight yet."""
        if is_transformed(call.loss):
            self._warn_of_transform(call)
            return None
        batch = self._loop.weights.upcoming([_start(call)])
        if is_alone() or self._loop.evaluations or not batch.split:
            return None
        if not self._needs_divisor(call, batch):
            return None
        self._group.synchronize(DIVISOR)
        divisor = call.divisor().to(torch.float32) * bool(batch.weight)
        return divisor * self._group.world.size / self._total(divisor).to(divisor).clamp(min=LEAST)

    @intercepts
    def criterion_grad(self, grad: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """The gradient of a loss, weighted by its divisor."""
        weight = self._loop.weight  # the strategy multiplies the whole loss by it
        return grad * (factor / weight).to(grad) if weight else grad

    def _warn_of_transform(self, call: Criterion) -> None:
        """Warn once: in ``torch.func.grad`` and ``vmap``, ranks cannot send tensors, and the loss has no hooks."""
        if not self._warned and call.weight is not None:
            self._warned = True
            warn(
                f"parwrap: the loss at {location()} is divided by the weights of its targets inside torch.func, where ranks cannot "
                "compare these weights. With batch='global', this rank's part is therefore weighted by its number of samples. Divide by "
                "the count over all ranks outside of torch.func: parwrap.mean_over_ranks(loss_sum, count), or use loss.backward(). This "
                "is shown once."
            )

    def _needs_divisor(self, call: Criterion, batch: Weighed) -> bool:
        """Whether the divisor may differ from the number of samples; all ranks decide alike, because they agree on it for each line."""
        if call.weight is not None or call.ignore_index != DEFAULT:
            return True
        targets, samples = call.target.numel(), (batch.samples, self._loop.weights.last.samples)
        fewer = targets < batch.samples
        # tokens or pixels: a part may have the same number by chance; a piece of the batch is weighted by the script
        differs = targets not in samples and not (fewer and _is_piece(call.target))
        site = call_site()
        if site not in self._known:
            self._known[site] = any(self._group.exchange(JUDGED, differs).values())
        if self._known[site]:
            if differs and fewer and batch.weight != 1.0:
                self._warn_of_fewer(call, batch)
            return True
        if self._warned:
            return False
        if differs or (call.target.device.type == "cpu" and bool((call.target == call.ignore_index).any())):
            self._warned = True
            warn(
                f"parwrap: at {location()} some targets are ignored, or a sample has several targets, so this rank's part is not "
                "weighted by its number of samples, and other ranks do not know this. Pass an ignore_index other than the default, such "
                "as -1, or divide by the count over all ranks: parwrap.mean_over_ranks(loss_sum, count). This is shown once."
            )
        return False

    def _warn_of_fewer(self, call: Criterion, batch: Weighed) -> None:
        """A mask has chosen from a batch after the model, and may have done so before it; or the batch is trained in pieces."""
        if not self._warned and batch.samples not in leading_sizes([_start(call)]):
            self._warned = True
            warn(
                f"parwrap: the loss at {location()} has fewer targets than this rank's part of the batch has samples, for example "
                "because a mask selects them, and is weighted by its number of targets. If it covers only one of several pieces of that "
                "part, choose a batch_size that is divisible by the number of ranks, or divide by the count over all ranks: "
                "parwrap.mean_over_ranks(loss_sum, count). This is shown once."
            )

    def _total(self, divisor: torch.Tensor) -> torch.Tensor:
        return all_reduced([divisor.to(torch.float32)], self._group)[0]


def _start(call: Criterion) -> torch.Tensor:
    """The tensor that tells the batch of ``call``: its loss, or its targets in compiled code, where the loss has no graph yet."""
    return call.loss if call.loss.requires_grad else call.target


def _is_piece(target: torch.Tensor) -> bool:
    """Whether ``target`` is a slice of more targets, rather than a copy of those that a mask has chosen.

    >>> _is_piece(torch.arange(8)[:4]), _is_piece(torch.arange(8)[torch.arange(8) < 4])
    (True, False)
    """
    return target.untyped_storage().nbytes() > target.nbytes


class Counts:
    """Sums of what the ranks count, such as tokens, at points where a rank that has left the loop counts nothing.

    Args:
        group: the process group.
        loop: the loop state, which has the weight of this rank's part of the running batch.
    """

    def __init__(self, group: Group, loop: Loop) -> None:
        self._group, self._loop = group, loop
        group.coordinator.answer(COUNT, lambda detail, present: sums_of([0.0, 0.0], group))

    def mean_factor(self, count: float, loss_sum: torch.Tensor) -> tuple[float, float]:
        """Factor that makes the average of the ranks' loss sums the global mean, and the total count.

        Args:
            count: the number of tokens or samples in the sum.
            loss_sum: the sum of their losses.
        """
        self._group.synchronize(COUNT)
        weight = self._loop.weights.upcoming([loss_sum]).weight
        total, weights = sums_of([count if weight else 0.0, weight], self._group)
        return (weights / (total * weight) if total and weight else 0.0), total
