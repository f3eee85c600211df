"""Sends gradients in fewer bytes: replaces a reducer's buckets by means of torch's communication hooks.

The facts that travel with the gradients, such as a rank's weight, must arrive exactly. They are taken out of their bucket and summed
separately, in full precision.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future

from parwrap.group.device import uses_nccl
from parwrap.options import Options
from parwrap.strategies.common.sparse_gradients import average_sparse

__all__ = ["Compressed", "compressed"]

START = 2
"""Backward passes of a set of parameters before PowerSGD begins, because DDP rebuilds its buckets after the first."""

EPSILON = 1e-8
"""Added to the norm of a column, which is 0 if no rank has a gradient."""

SPARK = 1e-6
"""A factor of PowerSGD is kept at least this part of the largest number away from 0, which it could never leave."""


def compressed(options: Options) -> Callable[[torch.Tensor], Compressed] | None:
    """Makes the sender of one reducer's buckets, given the parameter whose gradient holds the facts; ``None`` without compression."""
    if options.compress is None:
        return None
    return lambda facts: Compressed(options.compress, facts, options.powersgd_rank)


class Compressed:
    """Sends the buckets of one reducer.

    Args:
        compress: ``"bf16"``, ``"fp16"`` or ``"powersgd"``.
        facts: the parameter whose gradient holds the facts, such as the rank's weight. It is averaged in full precision.
        rank: the rank of the matrices that PowerSGD sends.
    """

    def __init__(self, compress: Any, facts: torch.Tensor, rank: int) -> None:
        self._facts = facts
        self._in_order = compress == "powersgd" and not uses_nccl()
        half: dict[str, Any] = {"bf16": bf16_compress_hook, "fp16": fp16_compress_hook}
        self._hook: Callable[[dist.GradBucket], Future] = partial(half[compress], None) if compress in half else _PowerSGD(rank)

    def send(self, state, bucket):  # DDP compares annotations with classes, but here they would be strings
        """The hook: starts to send ``bucket``, and returns a future of its average over the ranks."""
        if bucket.buffer().layout != torch.strided:
            return average_sparse(bucket)
        views = zip(bucket.parameters(), bucket.gradients(), strict=True)
        facts = next((view for parameter, view in views if parameter is self._facts), None)
        if facts is None:
            return self._started(bucket)
        mean = facts / dist.get_world_size()
        sending = dist.all_reduce(mean, async_op=True)
        facts.zero_()

        def with_facts(sent: Future) -> torch.Tensor:
            average = sent.value()
            sending.wait()
            facts.copy_(mean)  # a view of the bucket, which is what all hooks return
            return average

        return self._started(bucket).then(with_facts)

    def _started(self, bucket: dist.GradBucket) -> Future:
        sent = self._hook(bucket)
        if self._in_order:
            # it continues sending from another thread, and ranks must not differ in the order of this bucket and the next
            sent.wait()
        return sent


class _PowerSGD:
    """Vogels et al. (2019): sends low-rank matrices for each gradient, and adds the error to the next gradient.

    Errors are kept in the order of the buckets, so each reducer has separate ones.
    """

    def __init__(self, rank: int) -> None:
        self._state = PowerSGDState(None, rank, start_powerSGD_iter=START, orthogonalization_epsilon=EPSILON)
        self._sparks: dict[int, torch.Tensor] = {}

    def __call__(self, bucket: dist.GradBucket) -> Future:
        if bucket.buffer().dtype not in (torch.float32, torch.float64):
            return allreduce_hook(None, bucket)  # type: ignore[arg-type]
        self._mend(bucket.index())
        return powerSGD_hook(self._state, bucket)

    def _mend(self, index: int) -> None:
        """Reset the stored state where it is stuck: at 0 after a step without a gradient, or at non-finite values after an overflow."""
        if (error := self._state.error_dict.get(index)) is not None:
            error.nan_to_num_(0.0, 0.0, 0.0)
        if (factor := self._state.q_memory_dict.get(index)) is not None and factor.numel():
            factor.nan_to_num_(0.0, 0.0, 0.0)
            if index not in self._sparks:  # the same on all ranks
                spark = torch.randn(factor.shape, generator=torch.Generator().manual_seed(index), dtype=factor.dtype)
                self._sparks[index] = spark.to(factor)
            size = SPARK * factor.abs().max() + SPARK**2
            factor.copy_(torch.where(factor == 0, self._sparks[index] * size, factor))
