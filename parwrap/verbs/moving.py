"""``module.to(...)``, ``.cuda()``, ``.half()``: tell ``actor.moved`` once parameters have got another device or dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from parwrap.patching import Patch

__all__ = ["patches"]


def patches(actor: Any) -> list[Patch]:
    """All of them call ``_apply``, which calls itself for every submodule."""
    inside = False

    def apply(wrapped: Callable, instance: nn.Module, args: tuple, kwargs: dict) -> nn.Module:
        nonlocal inside
        if inside:
            return wrapped(*args, **kwargs)
        inside, before = True, _kinds(instance)
        try:
            result = wrapped(*args, **kwargs)
        finally:
            inside = False
        if _kinds(instance) != before:
            actor.moved()
        return result

    return [Patch(nn.Module, "_apply", apply)]


def _kinds(module: nn.Module) -> list[Any]:
    return [(p.dtype, p.device) for p in module.parameters()]
