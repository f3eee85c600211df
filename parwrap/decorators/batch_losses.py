"""Losses over the batches of all ranks: ``gather_with_grad`` for pairs of samples, ``mean_over_ranks`` for means of unequal counts."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from parwrap.decorators.distributed import open_loop, open_passes, trains_apart
from parwrap.errors import RankMismatchError, UsageError
from parwrap.loop.losses import counts_samples, leading_sizes
from parwrap.loop.passes import loss_factor
from parwrap.norm.exchange import Statistics, statistics_of
from parwrap.ranks.agreement import agree_on, home
from parwrap.ranks.collectives import different_structures, group_for, summed
from parwrap.ranks.group import Group, is_alone, world_size
from parwrap.rows.tensors import collected, whole_is_open
from parwrap.torch_private.autograd import in_backward

__all__ = ["gather_with_grad", "mean_over_ranks"]

KIND = "parwrap.gather_with_grad"


def gather_with_grad(x: torch.Tensor) -> torch.Tensor:
    """Gather the rows of every rank's ``x``, in the order of ranks, on every rank. Gradients flow back to the rank that a row came from.

    Use it for losses over pairs of samples, such as those of CLIP and SupCon. On every rank, compute the loss of the whole batch from the
    gathered rows; ``backward`` then leaves the gradient that a single process with the whole batch would compute.

    Args:
        x: a dense tensor with at least one dimension. Only the number of rows may differ between ranks.

    Returns:
        A tensor with the rows of all ranks along dimension 0, on the device of ``x``. It is ``x`` itself on one rank, in a pass that every
        rank reads whole, and with ``strategy="none"``.

    Raises:
        UsageError: ``x`` is not a dense tensor with rows, or is complex and requires a gradient; or the call is in a checkpoint that the
            backward recomputes.
        RankMismatchError: the dtype, the shape of a row or ``requires_grad`` differs between ranks; every rank raises it.

    >>> gather_with_grad(torch.tensor([[1.0], [2.0]]))
    tensor([[1.],
            [2.]])
    """
    if whole_is_open() is not None:
        return collected(x)
    if not isinstance(x, torch.Tensor):
        raise UsageError(f"parwrap.gather_with_grad() takes a tensor, not {type(x).__name__}: call it once for each tensor.")
    if x.dim() == 0 or x.layout != torch.strided or (x.is_complex() and x.requires_grad):
        problem = "is complex and requires a gradient: pass torch.view_as_real(x)"
        if x.layout != torch.strided:
            problem = f"has the layout {x.layout}: pass x.to_dense()"
        elif x.dim() == 0:
            problem = "has no dimension: pass one row for each sample"
        raise UsageError(f"parwrap.gather_with_grad() gathers the rows of dense tensors, but this one {problem}.")
    return cast(torch.Tensor, _from_all_ranks(x))


def mean_over_ranks(loss_sum: torch.Tensor, count: float | torch.Tensor) -> torch.Tensor:
    """Return a loss for ``backward``. Averaged over the ranks, its gradient is that of the mean over the tokens or samples of all ranks.

    A mean of the ranks' means would give a token on a rank with few tokens more weight than one on a rank with many.

    Args:
        loss_sum: the sum of this rank's losses; a scalar.
        count: the number of tokens or samples in it; may be 0.

    Returns:
        ``loss_sum`` times the number of ranks, divided by the sum of all ranks' counts. If parwrap multiplies the loss of this batch by a
        weight, it is also divided by that. It is 0 if nothing is counted or the weight is 0. On one rank, with ``strategy="none"``, and in
        a pass that every rank reads whole, it is the mean of this rank's losses.

    Raises:
        UsageError: ``loss_sum`` is not a tensor with one element, or ``count`` is negative or not finite.

    >>> mean_over_ranks(torch.tensor(6.0), 3)
    tensor(2.)
    """
    if not isinstance(loss_sum, torch.Tensor) or loss_sum.numel() != 1:
        what = f"one of shape {list(loss_sum.shape)}" if isinstance(loss_sum, torch.Tensor) else type(loss_sum).__name__
        raise UsageError(f"mean_over_ranks takes the sum of this rank's losses, a tensor with one element, not {what}.")
    number = float(count)
    if not (number >= 0 and math.isfinite(number)):
        raise UsageError(
            f"mean_over_ranks: count={count!r} is not the number of tokens or samples whose losses are in loss_sum. Pass a finite number "
            "that is 0 or more."
        )
    if is_alone() or trains_apart() or _reads_whole():
        return loss_sum * (1 / number if number else 0.0)
    loop, scale = open_loop(), 1.0
    if loop is not None and loop.passes.in_weighted_batch:  # the strategy multiplies the loss by it
        weight = loop.passes.batch(lambda: leading_sizes([loss_sum])).weight
        scale = weight * loss_factor(weight, world_size(), loop.options())
    total = summed("mean_over_ranks", number if scale else 0.0, group_for("mean_over_ranks"))
    loss = loss_sum * (world_size() / total / scale if total and scale else 0.0)
    counts_samples(loss)
    return loss


def _reads_whole() -> bool:
    """Whether the innermost open pass is one that every rank reads whole."""
    passes = open_passes()
    innermost = None if passes is None else passes.innermost
    return innermost is not None and not innermost.shared


# gather_with_grad


@torch.compiler.disable
def _from_all_ranks(x: torch.Tensor) -> torch.Tensor:
    group = None if trains_apart() or _reads_whole() else group_for("gather_with_grad")
    if group is None:
        return x
    if in_backward():
        raise UsageError(
            "parwrap.gather_with_grad() runs in a checkpoint that is recomputed in the backward pass, where ranks wait for each other's "
            "gradients: call it outside of the checkpointed part."
        )
    if (loop := open_loop()) is not None:
        loop.same_step.work.gathers()
        if loop.passes.is_stand_in(len(x)):
            x = x[:0]
    requires_grad = x.requires_grad and torch.is_grad_enabled()
    rows = _agreed_rows(x, requires_grad, group)
    if not requires_grad:
        return _sent(x, rows, group)
    sums = _sums.get(dist.group.WORLD)
    if sums is None:
        sums = _sums[dist.group.WORLD] = statistics_of(tuple(range(group.world.size)))
    sums.check_now()
    return _Gathered.apply(x, rows, group, sums)


_sums: weakref.WeakKeyDictionary[Any, Statistics] = weakref.WeakKeyDictionary()
"""For each process group of all ranks, the object that sums gradients over these ranks. Averages of gradients use another group."""


def _agreed_rows(x: torch.Tensor, requires_grad: bool, group: Group) -> list[int]:
    """The number of rows of ``x`` on each rank.

    Raises:
        RankMismatchError: the dtypes or shapes of rows, or ``requires_grad``, differ between ranks.
    """
    alike = {"each row": f"{list(x.shape[1:])} {str(x.dtype).removeprefix('torch.')}", "requires_grad": str(requires_grad)}

    def error(all_ranks: list[Any]) -> RankMismatchError | None:
        then = "Only the first dimension may differ between ranks."
        return different_structures("gather_with_grad", [structure for structure, _ in all_ranks], then)

    differing = agree_on(group, KIND, (alike, len(x)), error)
    return [len(x)] * group.world.size if differing is None else [rows for _, rows in differing]


def _sent(x: torch.Tensor, rows: Sequence[int], group: Group) -> torch.Tensor:
    """Gather the rows of all ranks, each rank's padded to the longest. They travel as bytes, because some backends lack some dtypes."""
    row_bytes = math.prod(x.shape[1:]) * x.element_size()
    mine = x.detach().contiguous().reshape(-1).view(torch.uint8)
    part = torch.zeros(max(rows) * row_bytes, dtype=torch.uint8, device=home(group))
    part[: len(mine)] = mine
    gathered = part.new_empty(len(rows), len(part))
    if len(part):
        with group.control_message(KIND):
            dist.all_gather(list(gathered), part)
    together = torch.cat([each[: count * row_bytes] for each, count in zip(gathered, rows, strict=True)])
    return together.to(x.device).view(x.dtype).view(sum(rows), *x.shape[1:])


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: Sequence[int], group: Group, sums: Statistics) -> torch.Tensor:
        ctx.rows, ctx.rank, ctx.sums = rows, group.world.rank, sums
        return _sent(x, rows, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradient of this rank's rows, from the losses of all ranks."""
        exact = gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient
        total = ctx.sums.nameless.summed(exact.reshape(-1)).view_as(gradient)
        first = sum(ctx.rows[: ctx.rank])
        return total[first : first + ctx.rows[ctx.rank]].to(gradient.dtype), None, None, None
