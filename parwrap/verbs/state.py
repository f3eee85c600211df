"""``optimizer.state_dict()`` and ``load_state_dict(state)``: let ``actor.state_dict`` and ``actor.load_state_dict`` change the state.

``actor.save_state`` and ``load_state`` get the optimizer and the call itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import Optimizer

from parwrap.patching import Patch

__all__ = ["load_patches", "loading_patches", "save_patches", "saving_patches"]


def save_patches(actor: Any) -> list[Patch]:
    def state_dict(wrapped: Callable, instance: Optimizer, args: tuple, kwargs: dict) -> Any:
        return actor.state_dict(instance, wrapped(*args, **kwargs))

    return [Patch(Optimizer, "state_dict", state_dict)]


def load_patches(actor: Any) -> list[Patch]:
    def load_state_dict(wrapped: Callable, instance: Optimizer, args: tuple, kwargs: dict) -> Any:
        def with_state(state_dict: Any) -> Any:
            return wrapped(actor.load_state_dict(instance, state_dict))

        return with_state(*args, **kwargs)

    return [Patch(Optimizer, "load_state_dict", load_state_dict)]


def saving_patches(actor: Any) -> list[Patch]:
    def state_dict(wrapped: Callable, instance: Optimizer, args: tuple, kwargs: dict) -> Any:
        return actor.save_state(instance, partial(wrapped, *args, **kwargs))

    return [Patch(Optimizer, "state_dict", state_dict)]


def loading_patches(actor: Any) -> list[Patch]:
    def load_state_dict(wrapped: Callable, instance: Optimizer, args: tuple, kwargs: dict) -> Any:
        return actor.load_state(instance, partial(wrapped, *args, **kwargs))

    return [Patch(Optimizer, "load_state_dict", load_state_dict)]
