"""``cross_entropy`` and ``nll_loss`` in compiled code: an operator passes each mean to ``Interceptor.criterion`` when the graph runs.

A compiler cannot trace communication between ranks. ``TRACED`` contains what ``torch.compile`` traces instead of torch's functions.
Whenever the operator runs, it looks up which interceptor is installed, so a graph does not contain it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import NoneType
from typing import Any

import torch
from torch.nn import functional

from parwrap.intercept.interceptor import Interceptor
from parwrap.torch_private.modes import current_transform

__all__ = ["TRACED", "Asked", "opened"]

CROSS_ENTROPY, NLL_LOSS = functional.cross_entropy, functional.nll_loss
"""Torch's own functions."""

Asked = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, int], torch.Tensor | None]
"""A function that returns what ``Interceptor.criterion`` returns, given a loss, its targets, their weights and the ignored class."""

_open: list[tuple[Interceptor, Asked]] = []


@contextmanager
def opened(interceptor: Interceptor, asked: Asked) -> Iterator[None]:
    """Make losses in compiled code call ``asked`` inside the block, for ``interceptor``."""
    _define_operators()
    _open.append((interceptor, asked))
    try:
        yield
    finally:
        _open.remove((interceptor, asked))


def _cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    loss = CROSS_ENTROPY(input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    if target.is_floating_point():  # probabilities of classes
        return loss
    return _counted(loss, target, weight, ignore_index, reduction == "mean" and reduce is not False and size_average is not False)


def _nll_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    loss = NLL_LOSS(input, target, weight, size_average, ignore_index, reduce, reduction)
    return _counted(loss, target, weight, ignore_index, reduction == "mean" and reduce is not False and size_average is not False)


TRACED: dict[str, Callable] = {"cross_entropy": _cross_entropy, "nll_loss": _nll_loss}
"""The functions that are compiled instead of torch's, by name."""


def _counted(loss: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int, is_mean: bool) -> torch.Tensor:
    """``loss``.

    If it is a mean with a gradient, it goes through an operator that calls ``Interceptor.criterion`` and ``criterion_grad`` when the graph
    runs.
    """
    return torch.ops.parwrap.criterion(loss, target, weight, ignore_index)[0] if is_mean and _counts(loss) else loss


def _counts(loss: torch.Tensor) -> bool:
    """Whether ``loss`` has a gradient here. Inside a ``torch.func`` transform, the transform decides."""
    return loss.requires_grad and not torch.compiler.is_exporting() and isinstance(current_transform(), NoneType)


@functools.cache
def _define_operators() -> None:
    """Register ``torch.ops.parwrap.criterion``, which torch keeps for the life of the process."""
    unsafe = (torch.Tag.cudagraph_unsafe,)
    schema = "(Tensor loss, Tensor target, Tensor? weight, int ignore_index) -> (Tensor, Tensor)"
    forward = torch.library.custom_op("parwrap::criterion", _forward, mutates_args=(), schema=schema, tags=unsafe)
    forward.register_fake(lambda loss, target, weight, ignore_index: (torch.empty_like(loss), loss.new_empty((), dtype=torch.float32)))
    backward = torch.library.custom_op(
        "parwrap::criterion_backward", _backward, mutates_args=(), schema="(Tensor grad, Tensor factor) -> Tensor", tags=unsafe
    )
    backward.register_fake(lambda grad, factor: torch.empty_like(grad))
    forward.register_autograd(_differentiate, setup_context=_save)


def _forward(loss: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss, and the factor for its gradient; NaN stands for no factor."""
    factor = _open[-1][1](loss, target, weight, ignore_index) if _open else None
    nothing = loss.new_full((), float("nan"), dtype=torch.float32)
    return loss.clone(), nothing if factor is None else nothing.copy_(factor)


def _backward(grad: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return torch.where(factor.isnan(), grad, _open[-1][0].criterion_grad(grad, factor)) if _open else grad.clone()


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: torch.Tensor, of_factor: Any) -> tuple[Any, ...]:
    (factor,) = ctx.saved_tensors
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return _backward(grad, factor), None, None, None  # this can be differentiated again
    return torch.ops.parwrap.criterion_backward(grad, factor), None, None, None
