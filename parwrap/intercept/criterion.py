"""``cross_entropy`` and ``nll_loss``: pass each mean loss to ``Interceptor.criterion``, with its divisor.

The loss modules call these functions too. With class weights or ignored targets the divisor is not the number of targets.

A compiler cannot trace what ranks send each other, so ``torch.compile`` reads ``TRACED`` in the place of torch's functions. There an
operator finds out each time it runs which interceptor is installed, so a graph holds nothing of it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from parwrap.intercept.interceptor import Interceptor
from parwrap.patching.patch import Patch
from parwrap.torch_private.modes import current_transform

__all__ = ["Criterion", "patches"]

CROSS_ENTROPY, NLL_LOSS = functional.cross_entropy, functional.nll_loss
"""Torch's own functions."""


class Criterion(NamedTuple):
    """A mean loss over classified targets.

    Attributes:
        loss: the mean.
        target: the class of each.
        weight: the weights of the classes.
        ignore_index: the class of ignored targets.
    """

    loss: torch.Tensor
    target: torch.Tensor
    weight: torch.Tensor | None
    ignore_index: int

    @torch.no_grad()
    def divisor(self) -> torch.Tensor:
        """The divisor of the sum."""
        counted = self.target != self.ignore_index
        if self.weight is None:
            return counted.sum()
        return (self.weight[torch.where(counted, self.target, 0).long()] * counted).sum()


def patches(interceptor: Interceptor) -> list[Patch | AbstractContextManager]:
    def patch(name: str) -> Patch:
        signature = inspect.signature(getattr(functional, name))

        def criterion(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
            loss = wrapped(*args, **kwargs)
            if torch.compiler.is_compiling() or not (isinstance(loss, torch.Tensor) and loss.requires_grad):
                return loss
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            target, named = given.arguments["target"], given.arguments
            if named["reduction"] != "mean" or named["reduce"] is False or named["size_average"] is False or target.is_floating_point():
                return loss
            factor = interceptor.criterion(Criterion(loss, target, named["weight"], named["ignore_index"]))
            if factor is not None:
                loss.register_hook(lambda grad: interceptor.criterion_grad(grad, factor))
            return loss

        return Patch(functional, name, criterion, TRACED[name])

    return [_operators().opened(interceptor), *(patch(name) for name in TRACED)]


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
    return _counted(loss, target, weight, ignore_index, reduction, reduce, size_average)


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
    return _counted(loss, target, weight, ignore_index, reduction, reduce, size_average)


TRACED: dict[str, Callable] = {"cross_entropy": _cross_entropy, "nll_loss": _nll_loss}
"""The functions that are compiled instead of torch's, by name."""


def _counted(
    loss: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    reduction: str,
    *deprecated: bool | None,
) -> torch.Tensor:
    """The ``loss``, whose gradient counts by its divisor if it is a mean; ``False`` in a ``deprecated`` argument makes it none."""
    if reduction != "mean" or False in deprecated or not _counts(loss):
        return loss
    return torch.ops.parwrap.criterion(loss, target, weight, ignore_index)[0]


def _counts(loss: torch.Tensor) -> bool:
    """Whether ``loss`` has a gradient here. Inside a ``torch.func`` transform, the transform decides."""
    return loss.requires_grad and not torch.compiler.is_exporting() and isinstance(current_transform(), NoneType)


@functools.cache
def _operators() -> _Operators:
    """The operators, which are made once: torch keeps them for the life of the process."""
    return _Operators()


class _Operators:
    """``torch.ops.parwrap.criterion`` and its backward, which ask the interceptor installed last."""

    def __init__(self) -> None:
        self._open: list[Interceptor] = []
        unsafe = (torch.Tag.cudagraph_unsafe,)
        schema = "(Tensor loss, Tensor target, Tensor? weight, int ignore_index) -> (Tensor, Tensor)"
        forward = torch.library.custom_op("parwrap::criterion", self._forward, mutates_args=(), schema=schema, tags=unsafe)
        forward.register_fake(lambda loss, target, weight, ignore_index: (torch.empty_like(loss), loss.new_empty((), dtype=torch.float32)))
        schema = "(Tensor grad, Tensor factor) -> Tensor"
        backward = torch.library.custom_op("parwrap::criterion_backward", self._backward, mutates_args=(), schema=schema, tags=unsafe)
        backward.register_fake(lambda grad, factor: torch.empty_like(grad))
        forward.register_autograd(self._differentiate, setup_context=_save)

    @contextmanager
    def opened(self, interceptor: Interceptor) -> Iterator[None]:
        """While this is open, losses in compiled code are those of ``interceptor``."""
        self._open.append(interceptor)
        try:
            yield
        finally:
            self._open.remove(interceptor)

    def _forward(
        self, loss: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss, and the factor for its gradient; NaN stands for no factor."""
        factor = self._open[-1].criterion(Criterion(loss, target, weight, ignore_index)) if self._open else None
        nothing = loss.new_full((), float("nan"), dtype=torch.float32)
        return loss.clone(), nothing if factor is None else nothing.copy_(factor)

    def _backward(self, grad: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return torch.where(factor.isnan(), grad, self._open[-1].criterion_grad(grad, factor)) if self._open else grad.clone()

    def _differentiate(self, ctx: Any, grad: torch.Tensor, of_factor: Any) -> tuple[Any, ...]:
        (factor,) = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return self._backward(grad, factor), None, None, None  # this can be differentiated again
        return torch.ops.parwrap.criterion_backward(grad, factor), None, None, None


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])
