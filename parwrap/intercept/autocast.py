"""A script's own ``with torch.autocast(...):`` and ``GradScaler.scale``: call ``enter_autocast`` and ``scale_by_hand``."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from parwrap.coordination.call_site import is_ours
from parwrap.intercept.interceptor import Interceptor
from parwrap.patching.patch import Patch

__all__ = ["autocast_patches", "scaler_patches"]

_BETWEEN = (os.path.dirname(torch.amp.__file__) + os.sep, contextlib.__file__)
"""The file of the frames between ``__enter__`` and the frame that enters the context."""


def autocast_patches(interceptor: Interceptor) -> list[Patch]:
    """``torch.cuda.amp.autocast`` is a subclass, and a function under ``@torch.autocast(...)`` enters it too."""

    def enter(wrapped: Callable, instance: torch.autocast, args: tuple, kwargs: dict) -> Any:
        if not torch.compiler.is_compiling() and _by_the_user():
            interceptor.enter_autocast(instance)
        return wrapped(*args, **kwargs)

    return [Patch(torch.amp.autocast_mode.autocast, "__enter__", enter)]


def scaler_patches(interceptor: Interceptor) -> list[Patch]:
    def scale(wrapped: Callable, instance: torch.amp.GradScaler, args: tuple, kwargs: dict) -> Any:
        interceptor.scale_by_hand(instance)
        return wrapped(*args, **kwargs)

    return [Patch(torch.amp.GradScaler, "scale", scale)]


def _by_the_user() -> bool:
    """Torch enters autocasts itself, for example to recompute a checkpoint; frame 2 calls ``__enter__``."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    return not is_ours(frame)
