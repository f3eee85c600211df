"""``tensor.retain_grad()``: tell ``actor.retain_grad`` about a tensor that is no leaf and keeps its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from parwrap.patching.patch import Patch

__all__ = ["patches"]


def patches(actor: Any) -> list[Patch]:
    def retain_grad(wrapped: Callable, instance: torch.Tensor, args: tuple, kwargs: dict) -> None:
        wrapped(*args, **kwargs)
        if not torch.compiler.is_compiling() and not instance.is_leaf:
            actor.retain_grad(instance)

    return [Patch(torch.Tensor, "retain_grad", retain_grad)]
