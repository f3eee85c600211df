"""What the fork server of ``parwrap.run`` loads before it forks ranks: importing this file is that process's first act.

The server ends with the launcher, and not by the signals that are meant for a script. In any other process this file does nothing.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any

from parwrap.processes import die_with_parent

__all__ = ["HANDLERS"]

HANDLERS: dict[int, Any] = {}
"""What a rank puts back: a terminal and a scheduler send their signals to all processes of a job, the server ignores them."""


def _become_fork_server(modules: list[str]) -> None:
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        HANDLERS[number] = signal.signal(number, signal.SIG_IGN)
    sys.path[:] = [entry for entry in sys.path if entry not in ("", os.getcwd())]  # not something that lies about where the command runs
    for name in modules:
        with suppress(Exception):  # a rank meets it again, and can report it
            import_module(name)
    gc.freeze()  # ranks need not look through what was here before them


if "PARWRAP_FORK_SERVER" in os.environ:  # set by run.py
    _become_fork_server(os.environ.pop("PARWRAP_FORK_SERVER").split(","))
