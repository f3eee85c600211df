"""Classification losses with ``batch="global"`` that are divided by another number than the samples: weights of classes, ignored targets.

The mean over a rank's part counts by its own divisor. Its gradient is multiplied by what makes the average over ranks that of the whole
batch; its value stays this rank's. That takes the sum of the divisors, one number, at each such loss. A loss over one target for each
sample, without weights, needs nothing.
"""

from __future__ import annotations

import torch

from parwrap.coordination.call_site import call_site, location, warn
from parwrap.group.collectives import all_reduced
from parwrap.group.group import Group, is_alone
from parwrap.intercept.criterion import Criterion
from parwrap.intercept.interceptor import Interceptor, intercepts
from parwrap.loop.batch_weights import Weighed
from parwrap.loop.loop_state import Loop
from parwrap.strategies.common.autograd_graph import leading_sizes
from parwrap.torch_private.modes import is_transformed

__all__ = ["WeightedMeans"]

DIVISOR = "a cross entropy that is weighted or ignores targets"

JUDGED = "the first cross entropy of its line"

DEFAULT = -100
"""torch's own ``ignore_index``, which most losses have and few targets."""

LEAST = 1e-30
"""Where no rank counts a target, there is no gradient."""


class WeightedMeans(Interceptor):
    """Has those losses count by their divisors.

    Args:
        group: the ranks.
        loop: knows which batch it is.
    """

    def __init__(self, group: Group, loop: Loop) -> None:
        self._group, self._loop = group, loop
        self._known: dict[tuple, bool] = {}
        self._warned = False
        group.coordinator.answer(DIVISOR, lambda detail, present: self._total(torch.zeros(())))
        group.coordinator.answer(JUDGED, lambda detail, present: None)

    @intercepts
    def criterion(self, call: Criterion) -> torch.Tensor | None:
        """What the gradient of ``call`` is multiplied by to count by its divisor, if it needs that; weights are not divided by yet."""
        if is_transformed(call.loss):
            self._warn_of_transform(call)
            return None
        batch = self._loop.weights.upcoming(lambda: _sizes(call))
        if is_alone() or self._loop.evaluations or not batch.split:
            return None
        if not self._needs_divisor(call, batch):
            return None
        self._group.synchronize(DIVISOR)
        divisor = call.divisor().to(torch.float32) * bool(batch.weight)
        return divisor * self._group.world.size / self._total(divisor).to(divisor).clamp(min=LEAST)

    @intercepts
    def criterion_grad(self, grad: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """The gradient of such a loss, which counts by its divisor."""
        weight = self._loop.weight  # by which the strategy multiplies the whole loss
        return grad * (factor / weight).to(grad) if weight else grad

    def _warn_of_transform(self, call: Criterion) -> None:
        """In ``torch.func.grad`` and ``vmap`` there is no tensor that ranks could send, and no hook on the loss."""
        if not self._warned and call.weight is not None:
            self._warned = True
            warn(
                f"parwrap: the loss at {location()} is divided by the weights of its targets inside torch.func, where ranks cannot compare "
                "them: with batch='global' this rank's part counts by its samples. Divide by what all ranks count outside of it: "
                "parwrap.mean_over_ranks(loss_sum, count), or use loss.backward(). This is said once."
            )

    def _needs_divisor(self, call: Criterion, batch: Weighed) -> bool:
        """Whether the divisor may be another number than the samples, which all ranks judge alike: they agree on it for each line."""
        if call.weight is not None or call.ignore_index != DEFAULT:
            return True
        targets, samples = call.target.numel(), (batch.samples, self._loop.weights.last.samples)
        fewer = targets < batch.samples
        # tokens or pixels: a part may have as many by chance; a piece of the batch has a weight of its own, which the script knows
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
                f"parwrap: some targets are ignored or more than one for a sample at {location()}, so this rank's part counts by another "
                "number than its samples, which other ranks do not know. Say so by ignore_index=-1, or any other class than the default, "
                "or divide by what all ranks count: parwrap.mean_over_ranks(loss_sum, count). This is said once."
            )
        return False

    def _warn_of_fewer(self, call: Criterion, batch: Weighed) -> None:
        """A mask has chosen from a batch after the model, and may have done so before it; or the batch is trained in pieces."""
        if not self._warned and batch.samples not in _sizes(call):
            self._warned = True
            warn(
                f"parwrap: the loss at {location()} is over fewer targets than this rank's part of the batch has samples, and counts by "
                "them, as where a mask has chosen them. If it is one of several pieces of that part, give the DataLoader a batch_size "
                "that the ranks divide, or divide by what all ranks count: parwrap.mean_over_ranks(loss_sum, count). This is said once."
            )

    def _total(self, divisor: torch.Tensor) -> torch.Tensor:
        return all_reduced([divisor.to(torch.float32)], self._group)[0]


def _sizes(call: Criterion) -> set[int]:
    """The first dimensions of what the loss of ``call`` was computed from; in compiled code no more is known than that of its targets."""
    return leading_sizes([call.loss]) if call.loss.requires_grad else set(call.target.shape[:1])


def _is_piece(target: torch.Tensor) -> bool:
    """Whether ``target`` is a slice of more targets, rather than a copy of those that a mask has chosen.

    >>> _is_piece(torch.arange(8)[:4]), _is_piece(torch.arange(8)[torch.arange(8) < 4])
    (True, False)
    """
    return target.untyped_storage().nbytes() > target.nbytes
