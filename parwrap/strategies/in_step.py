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

from parwrap.collectives import reduce_mean
from parwrap.group import is_alone
from parwrap.loop import Loop

__all__ = ["InStep"]


SENT = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool)


class InStep:
    """Keeps ranks in step where their own numbers would lead them apart."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._synced: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()

    def metric(self, metric: Any) -> Any:
        """The mean over ranks of what ``ReduceLROnPlateau`` looks at, or learning rates drift apart."""
        return metric if is_alone() else reduce_mean(float(metric))

    def closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure whose loss is the mean over ranks: LBFGS decides by it how often it goes on."""

        def with_mean() -> Any:
            loss = closure()
            return loss if loss is None or is_alone() else reduce_mean(loss * self._loop.weight)

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
        for buffers in alike.values():
            _take_rank_zeros(buffers)


@torch.no_grad()
def _take_rank_zeros(buffers: list[torch.Tensor]) -> None:
    flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
    dist.broadcast(flat, 0)
    for buffer, values in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_(values.view_as(buffer))
