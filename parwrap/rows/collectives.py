"""What ranks tell each other of rows, differentiable any number of times.

Ranks differentiate the sum of their losses, each by its own graph. The collectives have their true adjoints, so that the mean over
ranks of a parameter's gradient, which DDP leaves, is the gradient of one process: at any order of differentiation, and whatever is mixed.
"""

from __future__ import annotations

from typing import Any

import torch

from parwrap.errors import UsageError
from parwrap.places import script_place
from parwrap.ranks.group import alone_now, is_alone
from parwrap.ranks.shared_vectors import Messages
from parwrap.rows.layout import Layout

__all__ = ["Collectives"]


class Collectives:
    """The collectives of the ranks of a scope.

    Args:
        messages: sends short vectors.
        rank: this rank.
        size: the number of ranks.
        device: where numbers must be to be sent.

    Attributes:
        rank: this rank.
        size: the number of ranks.
    """

    def __init__(self, messages: Messages, rank: int, size: int, device: torch.device) -> None:
        self._messages, self.rank, self.size = messages, rank, size
        self._device = device

    def _refuse_alone(self) -> None:
        if alone_now and is_alone():
            raise UsageError(
                f"{script_place()} needs rows of other ranks in code that only one rank runs now. Compute it before, and pass it as an "
                "argument: all ranks collect the rows among the arguments of a function under @parwrap.rank_zero_only."
            )

    def mean(self, numbers: torch.Tensor) -> torch.Tensor:
        """The mean over ranks, differentiable."""
        return _Mean.apply(numbers, self)

    def gathered(self, local: torch.Tensor, layout: Layout, dim: int) -> torch.Tensor:
        """The whole of which ``local`` has this rank's rows in dimension ``dim``, differentiable."""
        if dim:
            return self.gathered(local.movedim(dim, 0), layout, 0).movedim(0, dim).contiguous()
        return _Gathered.apply(local, layout, self)

    def summed(self, numbers: torch.Tensor) -> torch.Tensor:
        """The sum over ranks of the tensors ``numbers``, which no rank changes."""
        self._refuse_alone()
        flat = numbers.detach().reshape(-1)
        if flat.is_complex():
            return torch.view_as_complex(self.summed(torch.view_as_real(numbers.detach().contiguous())))
        if flat.dtype in (torch.float32, torch.float64, torch.int64):
            sent = flat.clone()
        else:
            sent = flat.to(torch.float32 if flat.is_floating_point() else torch.int64)
        return self._messages.sum("the sum of rows over ranks", sent).to(numbers.dtype).view(numbers.shape)

    def total(self, number: float) -> float:
        """The sum over ranks of a number."""
        self._refuse_alone()
        return self._messages.total("the sum of rows over ranks", number, self._device)

    def parts(self, local: torch.Tensor, per_rank: list[int]) -> list[torch.Tensor]:
        """The tensors of all ranks, of which each has ``per_rank`` rows and all have the same other sizes. They travel as bytes."""
        self._refuse_alone()
        shape, top = local.shape[1:], max(per_rank)
        row = local.dtype.itemsize * shape.numel()
        length = -(-row * top // 8)
        if not length:
            return [local.new_empty((rows, *shape)) for rows in per_rank]
        sent = torch.zeros(length * 8, dtype=torch.uint8, device=local.device)
        if local.numel():
            sent[: row * local.shape[0]].view(local.dtype).copy_(local.detach().reshape(-1))
        found = self._messages.gather("the rows of all ranks", sent.view(torch.float64)).view(torch.uint8)
        return [
            bytes_[: row * rows].clone().view(local.dtype).view(rows, *shape) if row * rows else local.new_empty((rows, *shape))
            for bytes_, rows in zip(found.view(self.size, -1), per_rank, strict=True)
        ]


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, numbers: torch.Tensor, between: Collectives) -> torch.Tensor:
        ctx.between = between
        total = between.summed(numbers)
        return total / between.size if total.is_floating_point() or total.is_complex() else total // between.size

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor, None]:
        return ctx.between.mean(grads[0]), None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, layout: Layout, between: Collectives) -> torch.Tensor:
        ctx.layout, ctx.between = layout, between
        return layout.joined(between.parts(local, layout.per_rank))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor, None, None]:
        return _OwnSum.apply(grads[0], ctx.layout, ctx.between), None, None


class _OwnSum(torch.autograd.Function):
    """The sum over ranks, of which each keeps its rows: the adjoint of :class:`_Gathered`."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, layout: Layout, between: Collectives) -> torch.Tensor:
        ctx.layout, ctx.between = layout, between
        return layout.own(between.summed(whole)).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor, None, None]:
        return _Gathered.apply(grads[0], ctx.layout, ctx.between), None, None
