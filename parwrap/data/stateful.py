"""``state_dict()`` of torchdata's ``StatefulDataLoader`` on a rank: the state of the copy that it reads, with the seed of its order.

All ranks read the same number of batches, so rank 0's state, which is the one in a checkpoint, holds for all.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from parwrap.intercept.patch import Patch, when_imported

__all__ = ["Reading", "forwarded_states", "take_state"]

KEY = "parwrap"


class Reading(NamedTuple):
    """What a rank reads of a loader.

    Attributes:
        copy: the copy that is read; ``None`` if the loader itself is read.
        seed: the seed of the order of the last pass; ``None`` if that pass is exhausted.
        generator: the loader's own generator, if any, which draws the next orders.
    """

    copy: DataLoader | None
    seed: int | None = None
    generator: torch.Generator | None = None


def forwarded_states(
    reading: Callable[[DataLoader], Reading], resume: Callable[[DataLoader, int | None, torch.Tensor | None], None]
) -> AbstractContextManager[None]:
    """Inside the block, a stateful loader's ``state_dict()`` is that of the copy being read, if any; ``load_state_dict()`` resumes its
    order.

    Args:
        reading: a function that returns what a loader reads.
        resume: called with a loader, and the seed and the state of its generator that were saved.
    """

    loaded: weakref.WeakKeyDictionary[DataLoader, dict[str, Any]] = weakref.WeakKeyDictionary()

    def state_dict(wrapped: Callable, loader: Any, args: tuple, kwargs: dict) -> dict[str, Any]:
        if loader in loaded and loader.next_iter_state is not None:  # no pass has begun since
            return {**loaded[loader]}
        now = reading(loader)
        if now.copy is None or now.copy is loader:
            return wrapped(*args, **kwargs)
        drawn = None if now.generator is None else now.generator.get_state()
        return {**now.copy.state_dict(), KEY: {"seed": now.seed, "generator": drawn}}  # type: ignore[attr-defined]

    def load_state_dict(wrapped: Callable, loader: Any, args: tuple, kwargs: dict) -> None:
        state = args[0] if args else kwargs["state_dict"]
        wrapped({key: value for key, value in state.items() if key != KEY})
        loaded[loader] = {**state}
        if KEY in state:
            resume(loader, state[KEY]["seed"], state[KEY]["generator"])

    def patches(module: ModuleType) -> list[Patch]:
        kind = module.StatefulDataLoader
        return [Patch(kind, "state_dict", state_dict), Patch(kind, "load_state_dict", load_state_dict)]

    return when_imported("torchdata.stateful_dataloader.stateful_dataloader", patches)


def take_state(loader: DataLoader) -> None:
    """Forget a state that was loaded, once a copy of ``loader`` has resumed from it."""
    if getattr(loader, "next_iter_state", None) is not None:
        vars(loader)["next_iter_state"] = None
