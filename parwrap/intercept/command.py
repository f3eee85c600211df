"""``subprocess`` and ``os.system``: pass the command to ``Interceptor.run_command`` before it runs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from typing import Any

from parwrap.intercept.interceptor import Interceptor
from parwrap.patching.patch import Patch

__all__ = ["patches"]


def patches(interceptor: Interceptor) -> list[Patch]:
    def run(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
        interceptor.run_command(args[0] if args else kwargs.get("args", kwargs.get("command")))
        return wrapped(*args, **kwargs)

    return [Patch(subprocess.Popen, "__init__", run), Patch(os, "system", run)]
