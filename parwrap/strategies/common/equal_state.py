"""Keeps other state equal on all ranks, so that they stay in step: buffers, learning rates, the loss of a closure.

It intercepts the calls in which a loop decides something from one rank's numbers. Gradients are left to the strategy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from parwrap.group.collectives import sums_of
from parwrap.group.group import Group, is_alone
from parwrap.intercept.interceptor import Interceptor, intercepts
from parwrap.loop.loop_state import Loop
from parwrap.strategies.common.sent_values import SENT, copy_from, fingerprint, kind_of

__all__ = ["EqualState"]

EVALUATION = "evaluation"
METRIC = "ReduceLROnPlateau.step"
CLOSURE = "loss of a closure"

Key = tuple[int, int, str]
"""Identifies a buffer on all ranks: the position of its module among those that are set to eval, or the module's number, and its path."""


class EqualState(Interceptor):
    """Keeps ranks in step where a decision from one rank's numbers would make them diverge.

    Args:
        group: the process group.
        loop: what the training loop has done so far.
    """

    def __init__(self, group: Group, loop: Loop) -> None:
        self._group, self._loop = group, loop
        self._synced: weakref.WeakKeyDictionary[nn.Module, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._values: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        group.coordinator.answer(EVALUATION, lambda detail, present: self._take_buffers([], present))
        for kind in (METRIC, CLOSURE):
            group.coordinator.answer(kind, lambda detail, present: sums_of([0.0, 0.0], group))

    @intercepts
    def metric(self, metric: Any) -> Any:
        """The mean over ranks of the metric of ``ReduceLROnPlateau``; otherwise learning rates drift apart."""
        return metric if is_alone() else self._mean(METRIC, float(metric))

    @intercepts
    def closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure whose loss is the mean over ranks: LBFGS decides by it how long to continue."""

        def with_mean() -> Any:
            loss = closure()
            if loss is None or is_alone():
                return loss
            value = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
            mean = self._mean(CLOSURE, value * self._loop.weight * self._loop.loss_factor, self._loop.weight)
            return torch.full_like(loss, mean, requires_grad=False) if isinstance(loss, torch.Tensor) else mean

        return with_mean

    @intercepts
    def set_mode(self, module: nn.Module, training: bool) -> None:
        """When a root is set to eval after ranks have read shares, its buffers become rank 0's, as in DDP (BatchNorm's statistics)."""
        if training or is_alone():
            return
        modules = self._loop.evaluated_with(module)
        if any(self._synced.get(each, (0, 0)) != self._seen() for each in modules):
            self._take_buffers(modules, self._group.synchronize(EVALUATION))
        elif any(module is stranger for stranger in self._loop.strangers().values()):
            self.evaluation_begins()

    def evaluation_begins(self) -> None:
        """Copy rank 0's buffers into models outside all optimizers, such as moving averages, when the script begins to evaluate."""
        if is_alone() or self._seen() == (0, 0) or self._loop.parts:
            return
        if any(self._values.get(module, 0) != _values(module) for module in self._loop.strangers().values()):
            self._take_buffers([], self._group.synchronize(EVALUATION))

    def _seen(self) -> tuple[int, int]:
        """What may have made buffers differ by rank so far: backwards, and passes over shares, which a loop may read without training."""
        return self._loop.backwards, self._loop.begun

    def _mean(self, kind: str, weighted: float, weight: float = 1.0) -> float:
        self._group.synchronize(kind)
        total, weights = sums_of([weighted, weight], self._group)
        return total / weights

    @torch.no_grad()
    def _take_buffers(self, modules: list[nn.Module], present: list[int]) -> None:
        """Copy the buffers of ``modules`` and of models outside all optimizers from the lowest rank present.

        A rank that waits for something else ignores them.
        """
        source = min(present)
        here = self._group.world.rank in present
        strangers = self._loop.strangers() if here else {}
        mine: dict[Key, torch.Tensor] = {}
        numbered = [*((place, 0, each) for place, each in enumerate(modules)), *((-1, *each) for each in strangers.items())]
        for place, number, module in numbered:
            mine |= {(place, number, path): buffer for path, buffer in module.named_buffers() if _is_sendable(buffer)}
        layout = {key: (kind_of(buffer), fingerprint(buffer) if key[0] < 0 else 0) for key, buffer in mine.items()}
        gathered = self._group.share("buffers at evaluation", layout, present)
        # buffers of the modules are statistics, which differ; most others are constants
        views = gathered.values()
        sent = {key: each[0] for key, each in gathered[source].items() if key[0] >= 0 or any(view.get(key) != each for view in views)}
        copy_from(self._group, mine, sent, source)
        for module in modules:
            self._synced[module] = self._seen()
        for module in strangers.values():
            self._values[module] = _values(module)


def _is_sendable(buffer: torch.Tensor) -> bool:
    """Whether a collective can carry ``buffer``. Sparse or expanded buffers, or those of rare dtypes, are never running statistics."""
    return buffer.layout == torch.strided and buffer.is_contiguous() and buffer.dtype in SENT


def _values(module: nn.Module) -> int:
    """A number that shows whether buffers of ``module`` have changed."""
    return hash(tuple(fingerprint(buffer) for buffer in module.buffers() if _is_sendable(buffer)))
