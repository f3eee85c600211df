"""``torch.manual_seed`` and ``torch.set_rng_state``: forward each call to ``Interceptor.seeded`` or ``restored``, once it is done.

numpy and python have seeds of their own, which do not count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from parwrap.intercept.interceptor import Interceptor
from parwrap.patching.patch import Patch

__all__ = ["restored_patches", "seeded_patches"]


def seeded_patches(interceptor: Interceptor) -> list[Patch]:
    return [Patch(torch, "manual_seed", _then(interceptor.seeded))]


def restored_patches(interceptor: Interceptor) -> list[Patch]:
    # torch.random.fork_rng calls that of its own module
    return [Patch(owner, "set_rng_state", _then(interceptor.restored)) for owner in (torch, torch.random)]


def _then(done: Callable[[], None]) -> Callable:
    """Makes a function call ``done`` after it."""

    def wrapper(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
        result = wrapped(*args, **kwargs)
        done()
        return result

    return wrapper
