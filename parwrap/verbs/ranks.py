"""``dist.get_world_size()``, also by way of ``parwrap.world_size()``: tell ``actor.world_size_asked`` that somebody asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from parwrap.patching import Patch

__all__ = ["patches"]


def patches(actor: Any) -> list[Patch]:
    def world_size(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> int:
        actor.world_size_asked()
        return wrapped(*args, **kwargs)

    return [Patch(dist, "get_world_size", world_size)]
