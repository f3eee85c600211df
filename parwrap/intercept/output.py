"""``print``, logging and warnings: forward them to ``speak``, ``log``, ``points_to`` and ``show_warning``.

All are process-wide: other threads use the same interceptor.
"""

from __future__ import annotations

import builtins
import logging
import sys
import warnings
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

from parwrap.intercept.interceptor import Interceptor
from parwrap.patching.patch import Patch

__all__ = ["log_patches", "speak_patches", "stacklevel_patches", "warning_patches"]


def speak_patches(interceptor: Interceptor) -> list[Patch]:
    """``print(..., force=True)`` prints on every rank."""

    def speak(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> None:
        force = kwargs.pop("force", False)
        interceptor.speak(partial(wrapped, *args, **kwargs), file=kwargs.get("file"), force=force)

    return [Patch(builtins, "print", speak)]


def log_patches(interceptor: Interceptor) -> list[Patch]:
    def handle(wrapped: Callable, instance: logging.Logger, args: tuple, kwargs: dict) -> None:
        record = args[0] if args else kwargs["record"]
        interceptor.log(record, partial(wrapped, record))

    return [Patch(logging.Logger, "handle", handle)]


def stacklevel_patches(interceptor: Interceptor) -> list[Patch]:
    def moved(
        wrapped: Callable, caller: FrameType, message: Any, category: Any = None, stacklevel: int = 1, source: Any = None, **others: Any
    ) -> None:
        wrapped(message, category, interceptor.points_to(caller, max(stacklevel, 1)) + 2, source, **others)  # skip the two frames here

    def warn(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> None:
        moved(wrapped, sys._getframe(1), *args, **kwargs)

    return [Patch(warnings, "warn", warn)]


def warning_patches(interceptor: Interceptor) -> list[Patch]:
    def show(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> None:
        interceptor.show_warning(partial(wrapped, *args, **kwargs))

    return [Patch(warnings, "showwarning", show)]
