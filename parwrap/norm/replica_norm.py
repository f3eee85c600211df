"""Batch normalization of a batch that is split over the replicas of ``data_parallel``.

The mean and variance of each part go to the first replica's device, and the mean and variance of the whole batch come back. All of this is
in one autograd graph, so replicas do not wait for each other in a backward. On a CPU they could not wait: one thread runs their backwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from parwrap.intercept.intercepted_calls import Norm
from parwrap.strategies.replicas import Replica
from parwrap.torch_private.modules import registered_buffers, registered_parameters

__all__ = ["normalized_over_replicas"]


def normalized_over_replicas(call: Norm, replica: Replica) -> torch.Tensor:
    """``torch.nn.functional.batch_norm`` in training, with the statistics of the whole batch.

    Raises:
        ValueError: the whole batch has only one value for each channel.
        UsageError: another replica is in a different layer.
    """
    x = call.input if call.input.dtype == torch.float64 else call.input.float()
    shape = [1, -1, *[1] * (x.dim() - 2)]
    over = [0, *range(2, x.dim())]
    own = torch.var_mean(x, over, correction=0) if x.numel() else (x.sum(over), x.sum(over))
    *whole, count = replica.together(_name(call, replica), (*own, x.numel() // x.size(1)), _whole)
    var, mean = (each.to(x.device) for each in whole)
    if call.running_mean is not None and call.running_var is not None and count:
        with torch.no_grad():
            _follow(call.running_mean, mean, call.momentum)
            _follow(call.running_var, var * (count / (count - 1)), call.momentum)
    scale = (var + call.eps).rsqrt()
    scale = scale if call.weight is None else scale * call.weight
    out = (x - mean.view(shape)) * scale.view(shape)
    out = out if call.bias is None else out + call.bias.view(shape)
    return out.to(call.input.dtype)


def _whole(parts: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor, int]:
    count = sum(number for _, _, number in parts)
    if count == 1:
        raise ValueError("Expected more than 1 value per channel when training, got 1 in all replicas together")
    device = parts[0][0].device
    variances, means = (torch.stack([part[which].to(device) for part in parts]) for which in (0, 1))
    weights = means.new_tensor([[number / max(count, 1)] for _, _, number in parts])
    mean = (weights * means).sum(0)  # not a matrix product, which autocast would round
    return (weights * (variances + (means - mean).square())).sum(0), mean, count


def _follow(running: torch.Tensor, value: torch.Tensor, momentum: float) -> None:
    running.mul_(1 - momentum).add_(value.to(running.dtype), alpha=momentum)


def _name(call: Norm, replica: Replica) -> str:
    """The name of the layer, by which replicas check that they are all in the same layer."""
    layer = call.weight if call.running_mean is None else call.running_mean
    for path, module in replica.module.named_modules() if replica.module is not None and layer is not None else ():
        if layer is registered_buffers(module).get("running_mean") or layer is registered_parameters(module).get("weight"):
            return f"batch norm {path!r}"
    return "a batch norm"
