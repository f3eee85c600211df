"""``module.train()`` and ``module.eval()``: tell ``actor.set_mode`` about the outermost call, after it has taken effect.

``eval()`` is ``train(False)``, and ``train`` calls itself for every submodule; those inner calls are no news.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from parwrap.patching.patch import Patch

__all__ = ["patches"]


def patches(actor: Any) -> list[Patch]:
    inside = False

    def train(wrapped: Callable, instance: nn.Module, args: tuple, kwargs: dict) -> nn.Module:
        nonlocal inside
        if inside:
            return wrapped(*args, **kwargs)
        inside = True
        try:
            result = wrapped(*args, **kwargs)
        finally:
            inside = False
        actor.set_mode(instance, instance.training)
        return result

    return [Patch(nn.Module, "train", train)]
