"""The combination of the GPU's kernels; without a GPU, the formulas of their documentation replace them."""

import pytest
import torch
from torch import nn

from parwrap.norm import kernels
from test_forward_backward import X, check


def by_channel(numbers, like):
    return numbers.view(1, -1, *[1] * (like.dim() - 2))


def over(x):
    return [0, *range(2, x.dim())]


def stats(x, eps):
    var, mean = torch.var_mean(x, over(x), correction=0)
    return mean, (var + eps).rsqrt()


def gather(x, means, invstds, running_mean, running_var, momentum, eps, counts):
    parts = (counts / counts.sum()).unsqueeze(1)
    mean = (parts * means).sum(0)
    var = (parts * (invstds**-2 - eps + (means - mean).square())).sum(0)
    if running_mean is not None:
        running_mean.lerp_(mean, momentum)
        running_var.lerp_(var * counts.sum() / (counts.sum() - 1), momentum)
    return mean, (var + eps).rsqrt()


def elemt(x, weight, bias, mean, invstd, eps):
    out = (x - by_channel(mean, x)) * by_channel(invstd, x)
    return out if weight is None else out * by_channel(weight, x) + by_channel(bias, x)


def reduce(grad, x, mean, invstd, weight, *wanted):
    sum_centered = (grad * (x - by_channel(mean, x))).sum(over(x))
    return grad.sum(over(x)), sum_centered, sum_centered * invstd, grad.sum(over(x))


def backward_elemt(grad, x, mean, invstd, weight, sum_grad, sum_centered, counts):
    assert counts.dtype == torch.int32
    centered = (x - by_channel(mean, x)) * by_channel(invstd.square() * sum_centered / counts.sum(), x)
    out = (grad - by_channel(sum_grad / counts.sum(), x) - centered) * by_channel(invstd, x)
    return out if weight is None else out * by_channel(weight, x)


FORMULAS = {
    "batch_norm_stats": stats,
    "batch_norm_gather_stats_with_counts": gather,
    "batch_norm_elemt": elemt,
    "batch_norm_backward_reduce": reduce,
    "batch_norm_backward_elemt": backward_elemt,
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("split", [[4, 2], [0, 6]], ids=str)
@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": None}], ids=str)
def test_the_steps_for_a_gpu_are_equal_to_one_process_by_their_formulas(split, options):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kernels, "_CPU", kernels._GPU)
        for name, formula in FORMULAS.items():
            patched.setattr(torch, name, formula)
        check(nn.BatchNorm2d(3, dtype=torch.float64, **options), X.double(), split)


@pytest.mark.gpu
@pytest.mark.ranks(2)
@pytest.mark.parametrize("split", [[4, 2], [0, 6]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_gpu_is_equal_to_one_process(split, dtype):
    check(nn.BatchNorm2d(3, dtype=torch.float64 if dtype is torch.float64 else torch.float32).cuda(), X.cuda().to(dtype), split)
