"""``print``, logging and warnings: forward them to ``speak``, ``log``, ``points_to`` and ``show_warning``.

All are process-wide: other threads use the same interceptor.
"""

from __future__ import annotations

import builtins
import logging
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import FrameType
from typing import Any

from parwrap.intercept.interceptor import Interceptor
from parwrap.patching.patch import Patch, is_patched, when_imported
from parwrap.torch_private.jit import FIND_BUILTIN, SCRIPTING

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


def stacklevel_patches(interceptor: Interceptor) -> list[Patch | AbstractContextManager]:
    def moved(
        wrapped: Callable, caller: FrameType, message: Any, category: Any = None, stacklevel: int = 1, source: Any = None, **others: Any
    ) -> None:
        wrapped(message, category, interceptor.points_to(caller, max(stacklevel, 1)) + 2, source, **others)  # skip the two frames here

    def warn(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> None:
        moved(wrapped, sys._getframe(1), *args, **kwargs)

    def find_builtin(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
        function = args[0]
        return wrapped(function.__wrapped__ if is_patched(function) else function) or wrapped(function)

    # TorchScript identifies ``warnings.warn`` by object identity, and compiles functions of torch that call it
    return [Patch(warnings, "warn", warn), when_imported(SCRIPTING, lambda module: [Patch(module, FIND_BUILTIN, find_builtin)])]


def warning_patches(interceptor: Interceptor) -> list[Patch]:
    def show(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> None:
        interceptor.show_warning(partial(wrapped, *args, **kwargs))

    return [Patch(warnings, "showwarning", show)]
