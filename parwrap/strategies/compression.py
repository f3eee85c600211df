"""Compresses gradients for the all-reduce with torch's communication hooks: to half precision, or to low-rank matrices (PowerSGD).

The signal, the numbers that ranks tell each other, must arrive exactly. It is taken out of its bucket and averaged separately in full
precision, which costs one more small message in each backward.
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

from parwrap.options import Options
from parwrap.ranks.device import uses_nccl
from parwrap.strategies.ddp_averager import Hook, average_sparse

__all__ = ["compressing"]

START = 2
"""The number of backwards of a set of parameters before PowerSGD begins: DDP rebuilds its buckets after the first backward."""

EPSILON = 1e-8
"""PowerSGD adds this to the norm of a column before it divides by the norm, which is 0 if no rank has a gradient."""

SPARK = 1e-6
"""Zeros in a factor of PowerSGD would stay 0 forever. Random numbers of about this size, relative to the largest entry, replace them."""


def compressing(options: Options) -> Callable[[torch.Tensor], Hook] | None:
    """Return a function that makes the communication hook of a reducer from its signal; ``None`` without compression.

    >>> compressing(Options()) is None
    True
    """
    if options.compress is None:
        return None
    return lambda signal: _Compressed(options.compress, signal, options.powersgd_rank).send


class _Compressed:
    """Compresses and sends the buckets of one reducer.

    Args:
        compress: ``"bf16"``, ``"fp16"`` or ``"powersgd"``.
        signal: the parameter whose gradient is averaged in full precision.
        rank: the number of columns of the matrices that PowerSGD sends.
    """

    def __init__(self, compress: Any, signal: torch.Tensor, rank: int) -> None:
        self._signal = signal
        self._in_order = compress == "powersgd" and not uses_nccl()
        half: dict[str, Any] = {"bf16": bf16_compress_hook, "fp16": fp16_compress_hook}
        self._hook: Callable[[dist.GradBucket], Future] = partial(half[compress], None) if compress in half else _PowerSGD(rank)

    def send(self, state, bucket):  # DDP compares annotations with classes, but here they would be strings
        """Start to send ``bucket``, and return a future of its average over the ranks."""
        if bucket.buffer().layout != torch.strided:
            return average_sparse(bucket)
        views = zip(bucket.parameters(), bucket.gradients(), strict=True)
        signal = next((view for parameter, view in views if parameter is self._signal), None)
        if signal is None:
            return self._started(bucket)
        mean = signal / dist.get_world_size()
        sending = dist.all_reduce(mean, async_op=True)
        signal.zero_()

        def with_signal(sent: Future) -> torch.Tensor:
            average = sent.value()
            sending.wait()
            signal.copy_(mean)  # a view of the bucket, which is what all hooks return
            return average

        return self._started(bucket).then(with_signal)

    def _started(self, bucket: dist.GradBucket) -> Future:
        sent = self._hook(bucket)
        if self._in_order:
            # PowerSGD goes on sending from another thread, and the order of this bucket and the next must be the same on all ranks
            sent.wait()
        return sent


class _PowerSGD:
    """Sends low-rank matrices for each gradient, and adds the approximation error to the next gradient.

    See Vogels et al., 2019, https://arxiv.org/abs/1905.13727. Torch keeps the errors by the index of the bucket, so each reducer needs
    its own instance.
    """

    def __init__(self, rank: int) -> None:
        self._state = PowerSGDState(None, rank, start_powerSGD_iter=START, orthogonalization_epsilon=EPSILON)
        self._sparks: dict[int, torch.Tensor] = {}

    def __call__(self, bucket: dist.GradBucket) -> Future:
        # in a bucket, complex numbers are pairs of real ones, which PowerSGD would take for matrices
        if bucket.buffer().dtype not in (torch.float32, torch.float64) or any(p.is_complex() for p in bucket.parameters()):
            return allreduce_hook(None, bucket)  # type: ignore[arg-type]
        self._mend(bucket.index())
        return powerSGD_hook(self._state, bucket)

    def _mend(self, index: int) -> None:
        """Reset what is stuck in the state of bucket ``index``: zeros after a step without a gradient, and what an overflow left."""
        if (error := self._state.error_dict.get(index)) is not None:
            error.nan_to_num_(0.0, 0.0, 0.0)
        if (factor := self._state.q_memory_dict.get(index)) is not None and factor.numel():
            factor.nan_to_num_(0.0, 0.0, 0.0)
            if index not in self._sparks:  # the same on all ranks
                spark = torch.randn(factor.shape, generator=torch.Generator().manual_seed(index), dtype=factor.dtype)
                self._sparks[index] = spark.to(factor)
            size = SPARK * factor.abs().max() + SPARK**2
            factor.copy_(torch.where(factor == 0, self._sparks[index] * size, factor))
