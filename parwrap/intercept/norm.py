"""Batch normalization: forward each ``torch.nn.functional.batch_norm`` to ``Interceptor.norm``.

``torch.compile`` compiles ``Interceptor.traced_norm`` in its place.

Every BatchNorm module calls it, including lazy ones and subclasses, and so do functional calls; InstanceNorm does not.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from parwrap.intercept.interceptor import Interceptor
from parwrap.patching.patch import Patch

__all__ = ["Norm", "patches"]


class Norm(NamedTuple):
    """The arguments of one ``torch.nn.functional.batch_norm``, and torch's own function."""

    original: Callable[..., torch.Tensor]
    input: torch.Tensor
    running_mean: torch.Tensor | None
    running_var: torch.Tensor | None
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    training: bool = False
    momentum: float = 0.1
    eps: float = 1e-5

    def run(self) -> torch.Tensor:
        """Run torch's function."""
        return self.original(*self[1:])

    def run_by_itself(self) -> torch.Tensor:
        """Run torch's function, without any other interceptor."""
        return inspect.unwrap(self.original)(*self[1:])


def patches(interceptor: Interceptor) -> list[Patch]:
    def batch_norm(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> torch.Tensor:
        return interceptor.norm(Norm(wrapped, *args, **kwargs))

    return [Patch(functional, "batch_norm", batch_norm, interceptor.traced_norm)]
