"""Averages sparse gradients of a GPU: nccl has no sparse collective, so gloo does it on the CPU.

It is a communication hook for a reducer that has sparse gradients. Dense gradients go the usual way.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future

from parwrap.group.device import uses_nccl

__all__ = ["average_sparse", "send"]


def average_sparse(bucket: dist.GradBucket) -> Future:
    """The average of the sparse gradient in ``bucket`` over the ranks."""
    if not uses_nccl():
        return allreduce_hook(None, bucket)  # type: ignore[arg-type]
    gradient = bucket.buffer()
    average = (gradient / dist.get_world_size()).cpu()
    dist.all_reduce(average)
    sent: Future = Future(devices=[gradient.device] if gradient.is_cuda else None)
    sent.set_result(average.to(gradient.device))
    return sent


def send(state, bucket):  # DDP compares annotations with classes, but here they would be strings
    """The hook: starts to send ``bucket``, and returns a future of its average over the ranks."""
    return average_sparse(bucket) if bucket.buffer().layout != torch.strided else allreduce_hook(None, bucket)  # type: ignore[arg-type]
