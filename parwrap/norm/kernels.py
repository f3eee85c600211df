"""The arithmetic of a batch normalization, on the CPU and on a GPU: statistics of a part, merged and running ones, gradients.

Torch has no CPU kernels for a batch that is spread over ranks, so this file combines its CPU kernels for eval mode, which use given
statistics. The GPU kernels are those of ``torch.nn.SyncBatchNorm``. ``forward_backward.py`` exchanges numbers between the kernels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

__all__ = ["Reduced", "Running", "Whole", "accumulated", "kernels_for"]


class Whole(NamedTuple):
    """The whole batch.

    Attributes:
        merged: the statistics of the batch, in the kernels' form.
        total: the number of values of each channel.
        eps: the constant added to a variance.
    """

    merged: tuple[torch.Tensor, ...]
    total: float
    eps: float


class Running(NamedTuple):
    """The running statistics of a layer, if it has any, and how much a batch counts in them."""

    mean: torch.Tensor | None
    var: torch.Tensor | None
    momentum: float


class Reduced(NamedTuple):
    """The result of a rank's part of a backward.

    Attributes:
        sums: two numbers for each channel, which are then summed over the ranks.
        weight: the gradient of the weight.
        bias: the gradient of the bias.
        partial: the gradient of the input as if the statistics were constants; ``None`` on a GPU and for an empty input.
    """

    sums: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    partial: torch.Tensor | None = None


class _OnCPU:
    """Torch's CPU kernels. ``Whole.merged`` is the mean and the biased variance.

    Vectors have one number per channel. Such short operations all take about the same time, so the code uses few of them.
    """

    def prepared(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` in a dtype and a layout for the other steps."""
        return tensor if tensor.dtype == torch.float64 else tensor.float()

    def statistics(self, x: torch.Tensor, eps: float) -> torch.Tensor:
        """A vector with two numbers per channel, as in ``Whole.merged``, and at the end the number of values per channel in ``x``."""
        if not x.numel():
            return x.new_zeros(2 * x.size(1) + 1, dtype=torch.float64)
        mean, var = torch.batch_norm_update_stats(x, None, None, 0.0)
        return torch.cat([mean, var, torch.tensor([x.numel() // x.size(1)], dtype=torch.float64)])

    def merged(self, x: torch.Tensor, rows: torch.Tensor, total: float, running: Running, eps: float) -> tuple[torch.Tensor, ...]:
        """Compute the statistics of the whole batch from those of the ranks, and update the running statistics."""
        channels = x.size(1)
        parts = rows[:, -1] / total
        mean, var, _ = (parts @ rows).split([channels, channels, 1])
        mean, var = mean.to(x.dtype), (var + parts @ (rows[:, :channels] - mean).square_()).to(x.dtype)
        if running.mean is not None and running.var is not None:
            running.mean.mul_(1 - running.momentum).add_(mean, alpha=running.momentum)
            running.var.mul_(1 - running.momentum).add_(var, alpha=running.momentum * total / (total - 1))
        return mean, var

    def restored(self, mean: torch.Tensor, spread: torch.Tensor, total: float) -> tuple[torch.Tensor, ...]:
        """The statistics that :meth:`merged` returned, from the first two of them."""
        return mean, spread

    def normalized(self, x: torch.Tensor, weight: Any, bias: Any, whole: Whole) -> torch.Tensor:
        """The output for ``x``, which is not empty."""
        mean, var = whole.merged
        return torch.native_batch_norm(x, _like(weight, x), _like(bias, x), mean, var, False, 0.0, whole.eps)[0]

    def reduced(self, x: torch.Tensor, grad: torch.Tensor, weight: Any, whole: Whole) -> Reduced:
        """The first half of the backward for ``x``, which is not empty: this rank's sums, and the gradients of the weight and the bias."""
        mean, var = whole.merged
        partial, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
            grad, x, _like(weight, x), mean, var, None, None, False, whole.eps, [True, True, True]
        )
        return Reduced(torch.cat([grad_bias, grad_weight]), grad_weight, grad_bias, partial)

    def grad_input(
        self, x: torch.Tensor, grad: torch.Tensor, weight: Any, whole: Whole, sums: torch.Tensor, reduced: Reduced
    ) -> torch.Tensor:
        """The second half of the backward, given the sums over all ranks: the gradient of ``x``, which is not empty."""
        assert reduced.partial is not None
        mean, var = whole.merged
        scale = (var + whole.eps).rsqrt_().div_(whole.total)
        scale = scale if weight is None else scale.mul_(weight)
        through_mean, through_var = sums.view(2, -1) * scale
        # the gradient through the batch's statistics is a normalization of x too
        return reduced.partial.sub_(torch.native_batch_norm(x, through_var, through_mean, mean, var, False, 0.0, whole.eps)[0])


class _OnGPU:
    """Torch's GPU kernels. ``merged`` is the mean, the inverse standard deviation, and the number of values of each rank."""

    def prepared(self, tensor: torch.Tensor) -> torch.Tensor:
        last = tensor.is_contiguous(memory_format=torch.channels_last) or tensor.is_contiguous(memory_format=torch.channels_last_3d)
        return tensor if last else tensor.contiguous()

    def statistics(self, x: torch.Tensor, eps: float) -> torch.Tensor:
        if not x.numel():
            return x.new_zeros(2 * x.size(1) + 1, dtype=accumulated(x))
        mean, invstd = torch.batch_norm_stats(x, eps)
        return torch.cat([mean, invstd, mean.new_full((1,), x.numel() // x.size(1))])

    def merged(self, x: torch.Tensor, rows: torch.Tensor, total: float, running: Running, eps: float) -> tuple[torch.Tensor, ...]:
        rows = rows[rows[:, -1] >= 1]  # the kernel divides by each count
        means, invstds, counts = rows.split([x.size(1), x.size(1), 1], dim=1)
        counts = counts.reshape(-1)
        totals = counts if running.mean is None else counts.to(running.mean.dtype)
        mean, invstd = torch.batch_norm_gather_stats_with_counts(x, means.contiguous(), invstds.contiguous(), *running, eps, totals)
        return mean, invstd, counts.to(torch.int32)

    def restored(self, mean: torch.Tensor, spread: torch.Tensor, total: float) -> tuple[torch.Tensor, ...]:
        return mean, spread, torch.full((1,), int(total), dtype=torch.int32, device=mean.device)  # the kernels only need the sum

    def normalized(self, x: torch.Tensor, weight: Any, bias: Any, whole: Whole) -> torch.Tensor:
        mean, invstd, _ = whole.merged
        return torch.batch_norm_elemt(x, weight, bias, mean, invstd, whole.eps)

    def reduced(self, x: torch.Tensor, grad: torch.Tensor, weight: Any, whole: Whole) -> Reduced:
        mean, invstd, _ = whole.merged
        sum_grad, sum_grad_centered, grad_weight, grad_bias = torch.batch_norm_backward_reduce(
            grad, x, mean, invstd, weight, True, True, True
        )
        return Reduced(torch.cat([sum_grad, sum_grad_centered]), grad_weight, grad_bias)

    def grad_input(
        self, x: torch.Tensor, grad: torch.Tensor, weight: Any, whole: Whole, sums: torch.Tensor, reduced: Reduced
    ) -> torch.Tensor:
        mean, invstd, counts = whole.merged
        sum_grad, sum_grad_centered = sums.view(2, -1)
        return torch.batch_norm_backward_elemt(grad, x, mean, invstd, _like(weight, mean), sum_grad, sum_grad_centered, counts)


def kernels_for(x: torch.Tensor) -> _OnCPU | _OnGPU:
    """The kernels for the device type of ``x``."""
    return _GPU if x.is_cuda else _CPU


_CPU, _GPU = _OnCPU(), _OnGPU()


def _like(parameter: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
    return parameter if parameter is None else parameter.to(x.dtype)


def accumulated(x: torch.Tensor) -> torch.dtype:
    """The dtype in which the kernels sum over ``x``."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
