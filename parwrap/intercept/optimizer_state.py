"""``optimizer.state_dict()`` and ``load_state_dict(state)``: ``actor.optimizer_state`` gets what saves and gives the state, and
``actor.load_optimizer_state`` gets what loads, with the state."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import Optimizer

from parwrap.patching.patch import Patch

__all__ = ["load_patches", "save_patches"]


def save_patches(actor: Any) -> list[Patch]:
    def state_dict(wrapped: Callable, instance: Optimizer, args: tuple, kwargs: dict) -> Any:
        return actor.optimizer_state(instance, partial(wrapped, *args, **kwargs))

    return [Patch(Optimizer, "state_dict", state_dict)]


def load_patches(actor: Any) -> list[Patch]:
    def load_state_dict(wrapped: Callable, instance: Optimizer, args: tuple, kwargs: dict) -> None:
        return (lambda state_dict: actor.load_optimizer_state(instance, wrapped, state_dict))(*args, **kwargs)

    return [Patch(Optimizer, "load_state_dict", load_state_dict)]
