"""``copy.deepcopy(thing)``: hand the call to ``actor.deepcopy``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

from parwrap.patching import Patch

__all__ = ["patches"]


def patches(actor: Any) -> list[Patch]:
    def deepcopy(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
        return actor.deepcopy(partial(wrapped, *args, **kwargs))

    return [Patch(copy, "deepcopy", deepcopy)]
