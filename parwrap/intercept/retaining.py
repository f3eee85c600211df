"""``tensor.retain_grad()``: call ``Interceptor.retain_grad`` for a tensor that is not a leaf."""

from __future__ import annotations

from collections.abc import Callable

import torch

from parwrap.intercept.interceptor import Interceptor
from parwrap.patching.patch import Patch

__all__ = ["patches"]


def patches(interceptor: Interceptor) -> list[Patch]:
    def retain_grad(wrapped: Callable, instance: torch.Tensor, args: tuple, kwargs: dict) -> None:
        wrapped(*args, **kwargs)
        if not torch.compiler.is_compiling() and not instance.is_leaf:
            interceptor.retain_grad(instance)

    return [Patch(torch.Tensor, "retain_grad", retain_grad)]
