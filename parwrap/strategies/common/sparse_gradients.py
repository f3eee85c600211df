"""Averages sparse gradients one after another, on the CPU.

torch's gloo corrupts memory when it averages two sparse tensors at the same time: hand-written DDP over two sparse embeddings dies now
and then with ``malloc(): unaligned tcache chunk detected``. nccl has no sparse collective, so gloo averages those of a GPU too.

It is a communication hook for a reducer that has sparse gradients. Dense gradients go the usual way.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.futures import Future

__all__ = ["average_sparse", "send"]


def average_sparse(bucket: dist.GradBucket) -> Future:
    """Return the average of the sparse gradient in ``bucket`` over the ranks, and wait for it."""
    gradient = bucket.buffer()
    average = (gradient / dist.get_world_size()).cpu()
    dist.all_reduce(average)
    sent: Future = Future(devices=[gradient.device] if gradient.is_cuda else None)
    sent.set_result(average.to(gradient.device))
    return sent


def send(state, bucket):  # DDP compares annotations with classes, and here they would be strings
    """The hook: starts to send ``bucket``, and returns a future of its average over the ranks."""
    if bucket.buffer().layout != torch.strided:
        return average_sparse(bucket)
    # as DDP does without a hook; torch's own allreduce_hook divides, which rounds in another way on three ranks
    shared = bucket.buffer().mul_(1 / dist.get_world_size())
    sending = dist.all_reduce(shared, async_op=True)
    return sending.get_future().then(lambda sent: sent.value()[0])
