"""``module.to(...)``, ``.cuda()``, ``.half()``: forward calls that change the device or dtype of parameters to ``Interceptor.move``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from parwrap.intercept.interceptor import Interceptor
from parwrap.patching.patch import Patch
from parwrap.torch_private.modules import APPLY

__all__ = ["patches"]


def patches(interceptor: Interceptor) -> list[Patch]:
    """All of them call ``_apply``, which calls itself for every submodule."""
    inside = False

    def apply(wrapped: Callable, instance: nn.Module, args: tuple, kwargs: dict) -> nn.Module:
        def run() -> nn.Module:
            nonlocal inside
            inside = True
            try:
                return wrapped(*args, **kwargs)
            finally:
                inside = False

        if inside:
            return wrapped(*args, **kwargs)
        return interceptor.move(instance, run) if _changes(instance, *args, **kwargs) else run()

    return [Patch(nn.Module, APPLY, apply)]


def _changes(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], *rest: Any, **options: Any) -> bool:
    """Whether ``function`` changes the kind of the parameters' tensors; it is tried on empty ones."""
    kinds = {(p.dtype, p.device) for p in module.parameters()}
    made = [(kind, function(torch.empty(0, dtype=kind[0], device=kind[1]))) for kind in kinds]
    return any((tensor.dtype, tensor.device) != kind for kind, tensor in made)
