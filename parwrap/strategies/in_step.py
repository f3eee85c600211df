"""What else must be the same on all ranks, so that they go on in step: buffers, learning rates, the loss of a closure.

The actor on the verbs by which a loop decides something from numbers of its own rank. Gradients are a strategy's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parwrap.collectives import all_reduced
from parwrap.group import Group, is_alone
from parwrap.loop import Loop

__all__ = ["InStep"]

EVALUATION = "evaluation"
METRIC = "ReduceLROnPlateau.step"
CLOSURE = "loss of a closure"

SENT = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool)

Layout = list[tuple[torch.dtype, int]]
"""The dtype and the number of elements of each tensor that is sent."""


class InStep:
    """Keeps ranks in step where their own numbers would lead them apart.

    Args:
        group: the process group.
        loop: what the training loop has done so far.
    """

    def __init__(self, group: Group, loop: Loop) -> None:
        self._group, self._loop = group, loop
        self._synced: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        group.meetings.answer(EVALUATION, lambda detail, present: self._take_buffers([], present))
        for kind in (METRIC, CLOSURE):
            group.meetings.answer(kind, lambda detail, present: self._weighted_sum(0.0, weight=0.0))

    def metric(self, metric: Any) -> Any:
        """The mean over ranks of what ``ReduceLROnPlateau`` looks at, or learning rates drift apart."""
        return metric if is_alone() else self._mean(METRIC, float(metric))

    def closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure whose loss is the mean over ranks: LBFGS decides by it how often it goes on."""

        def with_mean() -> Any:
            loss = closure()
            if loss is None or is_alone():
                return loss
            value = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
            mean = self._mean(CLOSURE, value * self._loop.weight * self._loop.loss_factor, self._loop.weight)
            return torch.full_like(loss, mean, requires_grad=False) if isinstance(loss, torch.Tensor) else mean

        return with_mean

    def set_mode(self, module: nn.Module, training: bool) -> None:
        """When a root is set to eval after training, its buffers become rank 0's, as in DDP (BatchNorm's statistics)."""
        if training or is_alone() or self._synced.get(module, 0) == self._loop.backwards or not self._loop.is_root(module):
            return
        self._synced[module] = self._loop.backwards
        alike: dict[Any, list[torch.Tensor]] = {}
        for buffer in module.buffers():
            # what a collective cannot carry (sparse, expanded, rare dtypes) is no running statistic
            if buffer.layout == torch.strided and buffer.is_contiguous() and buffer.dtype in SENT:
                alike.setdefault((buffer.dtype, buffer.device), []).append(buffer)
        self._take_buffers(list(alike.values()), self._group.meet(EVALUATION))

    def _mean(self, kind: str, weighted: float, weight: float = 1.0) -> float:
        self._group.meet(kind)
        total, weights = self._weighted_sum(weighted, weight)
        return total / weights

    def _weighted_sum(self, value: float, weight: float) -> list[float]:
        return all_reduced([torch.tensor([value, weight], dtype=torch.float64)], self._group)[0].tolist()

    @torch.no_grad()
    def _take_buffers(self, alike: list[list[torch.Tensor]], present: list[int]) -> None:
        """Take the buffers of the lowest rank that is there; a rank that has come for something else lets them pass."""
        source = min(present)
        flats = [torch.cat([buffer.reshape(-1) for buffer in buffers]) for buffers in alike]
        if len(present) < self._group.world.size:
            layout: Layout = [(flat.dtype, flat.numel()) for flat in flats]
            layout = self._group.share("buffers", layout, present)[source]
            if self._group.world.rank not in present:
                flats = [torch.empty(numel, dtype=dtype, device=self._group.device) for dtype, numel in layout]
        for flat in flats:
            dist.broadcast(flat, source)
        for buffers, flat in zip(alike, flats, strict=False):
            for buffer, values in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
                buffer.copy_(values.view_as(buffer))
