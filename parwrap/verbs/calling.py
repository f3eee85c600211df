"""``module(...)``: hand the call of a module to ``actor.call``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from parwrap.patching import Patch

__all__ = ["patches"]


def patches(actor: Any) -> list[Patch]:
    def call(wrapped: Callable, instance: nn.Module, args: tuple, kwargs: dict) -> Any:
        if torch.compiler.is_compiling():  # which would trace into the actor
            return wrapped(*args, **kwargs)
        return actor.call(instance, args, kwargs, wrapped)

    return [Patch(nn.Module, "__call__", call)]
