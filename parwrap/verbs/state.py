"""``optimizer.state_dict()`` and ``load_state_dict(state)``: let ``actor.state_dict`` and ``actor.load_state_dict`` change the state.

``actor.loaded_state(optimizer)`` is told of an optimizer that has loaded one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from parwrap.patching import Patch

__all__ = ["load_patches", "loaded_patches", "save_patches"]


def save_patches(actor: Any) -> list[Patch]:
    def state_dict(wrapped: Callable, instance: Optimizer, args: tuple, kwargs: dict) -> Any:
        return actor.state_dict(wrapped(*args, **kwargs))

    return [Patch(Optimizer, "state_dict", state_dict)]


def load_patches(actor: Any) -> list[Patch]:
    def load_state_dict(wrapped: Callable, instance: Optimizer, args: tuple, kwargs: dict) -> Any:
        def with_state(state_dict: Any) -> Any:
            return wrapped(actor.load_state_dict(state_dict))

        return with_state(*args, **kwargs)

    return [Patch(Optimizer, "load_state_dict", load_state_dict)]


def loaded_patches(actor: Any) -> list[Patch]:
    def load_state_dict(wrapped: Callable, instance: Optimizer, args: tuple, kwargs: dict) -> None:
        wrapped(*args, **kwargs)
        actor.loaded_state(instance)

    return [Patch(Optimizer, "load_state_dict", load_state_dict)]
