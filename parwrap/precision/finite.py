"""Checks whether the gradients for an optimizer's step are finite: after a backward pass, and again after changes.

Gradients also change without a backward pass, when the user clips them or another interceptor sets them. ``scaling.py`` asks and acts on
the answer.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from parwrap.torch_private.amp import check_finite_and_unscale_
from parwrap.torch_private.tensors import sparse_values, version_of

__all__ = ["Found"]


class Found:
    """The result of a check of parameters' gradients; a GPU is synchronized only when the result is needed.

    Args:
        parameters: the parameters whose gradients are checked.
        later: check later, because a step does not use these gradients.

    Attributes:
        counted: whether the step of this check was counted.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> weight.grad = torch.ones(2)
    >>> found = Found([weight])
    >>> weight.grad = torch.tensor([1.0, torch.inf])
    >>> found.look_again([weight])
    >>> found.any
    True
    """

    def __init__(self, parameters: Iterable[torch.Tensor], later: bool = False) -> None:
        self.counted = False
        self._flags: dict[torch.device, torch.Tensor] = {}
        self._any: bool | None = None
        self._seen: list[tuple[weakref.ref[torch.Tensor], int] | None] | None = None
        if not later:
            self.look_again(parameters)

    @property
    def any(self) -> bool:
        """Whether a gradient is infinite or NaN."""
        if self._any is None:
            self._any = any(flag.item() for flag in self._flags.values())
        return self._any

    @torch.no_grad()
    def look_again(self, parameters: Iterable[torch.Tensor]) -> None:
        """Check gradients that were set or changed since the last check. Earlier results hold until the step."""
        grads = [p.grad for p in parameters]
        if self._is_seen(grads):
            return
        if self.counted:
            self._flags, self.counted = {}, False
        self._look(grads)
        self._see(grads)

    def accept(self, parameters: Iterable[torch.Tensor]) -> None:
        """Record that gradients were changed in a way that may hide non-finite values found earlier."""
        self._see([p.grad for p in parameters])

    def _is_seen(self, grads: list[torch.Tensor | None]) -> bool:
        return (
            self._seen is not None
            and len(self._seen) == len(grads)
            and all(
                grad is None if seen is None else grad is not None and seen[0]() is grad and seen[1] == version_of(grad)
                for seen, grad in zip(self._seen, grads, strict=True)
            )
        )

    def _see(self, grads: list[torch.Tensor | None]) -> None:
        self._seen = [None if grad is None else (weakref.ref(grad), version_of(grad)) for grad in grads]

    def _look(self, grads: list[torch.Tensor | None]) -> None:
        self._any = None
        alike: dict[tuple[torch.device, torch.dtype, bool], list[torch.Tensor]] = {}
        for grad in grads:
            if grad is not None:
                alike.setdefault((grad.device, grad.dtype, grad.requires_grad), []).append(sparse_values(grad) if grad.is_sparse else grad)
        for (device, dtype, has_graph), same in alike.items():
            flag = self._flag(device)
            # GradScaler's kernel does not support complex numbers, and even a factor of 1 changes a gradient in place, which may have a
            # graph
            if has_graph or dtype.is_complex:
                for grad in same:
                    flag.copy_(torch.maximum(flag, (~grad.isfinite().all()).float()))
            else:
                one = torch.ones((), dtype=torch.float32, device=device)
                check_finite_and_unscale_(same, flag, one)

    def _flag(self, device: torch.device) -> torch.Tensor:
        if device not in self._flags:
            self._flags[device] = torch.zeros((), dtype=torch.float32, device=device)
        return self._flags[device]
