"""Batch normalization of a batch that is split over ranks: forward, backward, and when numbers are exchanged.

In the forward pass, each rank sends the mean, variance and size of its part, and all ranks normalize with the mean and variance of the
whole batch: one collective. In the backward pass, the ranks sum two numbers per channel: another collective. The ``exchange`` sends these
numbers; ``kernels.py`` has torch's kernels for the local computation.

The gradients are those of the sum of all ranks' losses. A rank's ``weight.grad`` contains only the gradient through its part of the batch,
as in torch's ``SyncBatchNorm``. DDP then averages the gradients, which gives the gradient of the mean of the ranks' losses.
"""

from __future__ import annotations

from typing import Any

import torch

from parwrap.norm.exchange import Exchange
from parwrap.norm.kernels import Reduced, Running, Whole, accumulated, kernels_for

__all__ = ["BatchNorm", "differentiable", "gradients", "normalize"]


class BatchNorm(torch.autograd.Function):
    """``torch.nn.functional.batch_norm`` in training, for an input that is this rank's part of the batch.

    Raises:
        ValueError: the whole batch has only one value for each channel.
    """

    @staticmethod
    def forward(
        ctx: Any,
        exchange: Exchange,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running: Running,
        eps: float,
    ) -> torch.Tensor:
        out, merged, total = normalize(exchange, input, weight, bias, running, eps)
        ctx.exchange, ctx.total, ctx.eps = exchange, total, eps
        ctx.save_for_backward(input, weight, bias, *merged)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        input, weight, bias, *merged = ctx.saved_tensors
        needed = ctx.needs_input_grad[1:4]
        if not ctx.total:
            return (None, grad, *(None if p is None else torch.zeros_like(p) for p in (weight, bias)), None, None)
        if torch.is_grad_enabled():
            grads = differentiable(ctx.exchange, grad, (input, weight, bias), needed, ctx.total, ctx.eps)
        else:
            grads = gradients(ctx.exchange, grad, (input, weight, bias), needed, Whole(tuple(merged), ctx.total, ctx.eps))
        return (None, *grads, None, None)


Three = tuple[Any, Any, Any]
"""Three values: for the input, the weight and the bias."""


def normalize(
    exchange: Exchange,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running: Running,
    eps: float,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], float]:
    """The output for this rank's part of a batch, the statistics of the whole batch, and the whole batch's number of values per channel.

    Updates the running statistics in place. If no rank has any value, the statistics are empty.

    Raises:
        ValueError: the whole batch has only one value for each channel.
    """
    kernels = kernels_for(input)
    x = kernels.prepared(input)
    rows, total = exchange.gathered(kernels.statistics(x, eps))
    if total == 1:
        raise ValueError(
            "Expected more than 1 value per channel when training, got 1 on all ranks that share the statistics, with input "
            f"size {input.size()} on this rank: use larger batches"
        )
    if not total:
        return input.clone(), (), total
    merged = kernels.merged(x, rows, total, running, eps)
    whole = Whole(merged, total, eps)
    out = kernels.normalized(x, weight, bias, whole).to(input.dtype) if input.numel() else torch.empty_like(input)
    return out, merged, total


def gradients(exchange: Exchange, grad: torch.Tensor, of: Three, needed: Three, whole: Whole) -> Three:
    """The gradients of this rank's normalization for the input, weight and bias; ``None`` for those that are not ``needed``."""
    input, weight, bias = of
    kernels = kernels_for(input)
    x, grad = kernels.prepared(input), kernels.prepared(grad)
    if input.numel():
        reduced = kernels.reduced(x, grad, weight, whole)
    else:
        nothing = torch.zeros_like(whole.merged[0])
        reduced = Reduced(torch.cat([nothing, nothing]), nothing, nothing)
    grad_input = None
    if needed[0]:
        sums = exchange.summed(reduced.sums)
        grad_input = kernels.grad_input(x, grad, weight, whole, sums, reduced) if input.numel() else grad
        grad_input = grad_input.to(input.dtype)
    grad_weight = reduced.weight.to(weight.dtype) if needed[1] else None
    grad_bias = reduced.bias.to(bias.dtype) if needed[2] else None
    return grad_input, grad_weight, grad_bias


class _Sum(torch.autograd.Function):
    """The sum over ranks, differentiable any number of times."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, numbers: torch.Tensor) -> torch.Tensor:
        ctx.exchange = exchange
        return exchange.summed(numbers)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, _Sum.apply(ctx.exchange, grad)


def differentiable(exchange: Exchange, grad: torch.Tensor, of: Three, needed: Three, total: float, eps: float) -> Three:
    """Like :func:`gradients`, for ``create_graph=True``: computed from the formula, so that they can be differentiated again."""
    input, weight, bias = of
    over = [0, *range(2, input.dim())]
    shape = [1, -1, *[1] * (input.dim() - 2)]
    x = input.to(accumulated(input))
    centered = x - (_Sum.apply(exchange, x.sum(over)) / total).view(shape)
    variance = _Sum.apply(exchange, centered.square().sum(over)) / total
    out = centered * (variance + eps).rsqrt().view(shape)
    out = out if weight is None else out * weight.view(shape)
    out = out if bias is None else out + bias.view(shape)
    wanted = [tensor for tensor, need in zip(of, needed, strict=True) if need]
    found = iter(torch.autograd.grad(out, wanted, grad.to(out.dtype), create_graph=True))
    return tuple(next(found) if need else None for need in needed)  # type: ignore[return-value]
