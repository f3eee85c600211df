"""``cross_entropy`` and ``nll_loss``: pass each mean loss to ``Interceptor.criterion``, with its divisor.

The loss modules call these functions too. With class weights or ignored targets the divisor is not the number of targets. In code that
``torch.compile`` compiles, ``compiled_criterion.py`` does this.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from parwrap.intercept.compiled_criterion import TRACED, opened
from parwrap.intercept.interceptor import Interceptor
from parwrap.patching.patch import Patch

__all__ = ["Criterion", "patches"]


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

    return [opened(interceptor, lambda *call: interceptor.criterion(Criterion(*call))), *(patch(name) for name in TRACED)]
