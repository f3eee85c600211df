"""``print`` and logging: hand the calls to ``actor.speak`` and ``actor.log``.

Both are process-wide: other threads speak through the same actor.
"""

from __future__ import annotations

import builtins
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from parwrap.patching import Patch

__all__ = ["log_patches", "speak_patches"]


def speak_patches(actor: Any) -> list[Patch]:
    """``print(..., force=True)`` is for what every rank may say."""

    def speak(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> None:
        force = kwargs.pop("force", False)
        actor.speak(partial(wrapped, *args, **kwargs), file=kwargs.get("file"), force=force)

    return [Patch(builtins, "print", speak)]


def log_patches(actor: Any) -> list[Patch]:
    def handle(wrapped: Callable, instance: logging.Logger, args: tuple, kwargs: dict) -> None:
        record = args[0] if args else kwargs["record"]
        actor.log(record, partial(wrapped, record))

    return [Patch(logging.Logger, "handle", handle)]
