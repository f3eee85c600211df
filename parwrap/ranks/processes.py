"""How a process reacts when its parent or child process ends. Nothing here imports torch, because the launcher uses it too."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from typing import NoReturn

__all__ = ["die_with_parent", "forks_end_here", "how_ended", "signal_name"]

LOOK = 0.5
"""Seconds between two looks for the parent process."""


def die_with_parent(parent: int | None = None) -> None:
    """End this process when its parent ends, however that ends: by the kernel on Linux, elsewhere by a thread that looks.

    Args:
        parent: the number of the parent process; if it has ended by now, this process ends at once.
    """
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_end_after, args=(multiprocessing.parent_process(), os.getppid()), daemon=True).start()
    if parent is not None and os.getppid() != parent:
        os._exit(1)


@contextmanager
def forks_end_here() -> Iterator[None]:
    """A process that is forked inside the block ends where it leaves the block: only this process runs what follows.

    Exit handlers do not run, as in processes of multiprocessing: they are the parent's, and would remove its temporary folders.
    """
    process = os.getpid()
    try:
        yield
    except BaseException as error:
        if os.getpid() == process:
            raise
        _end_fork(error)
    if os.getpid() != process:
        _end_fork(None)


def _end_fork(error: BaseException | None) -> NoReturn:
    status = 0 if error is None else 1
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    elif error is not None:
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()  # type: ignore[attr-defined]
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed, or None
            stream.flush()
    os._exit(status & 0xFF)


def _end_after(starter: BaseProcess | None, parent: int) -> None:
    """End this process after the one that has started it by multiprocessing, else after its ``parent``."""
    if starter is not None:
        starter.join()
    else:
        while os.getppid() == parent:
            time.sleep(LOOK)
    os._exit(1)


def signal_name(number: int) -> str:
    """The name of a signal.

    >>> signal_name(9), signal_name(35)
    ('SIGKILL', 'signal 35')
    """
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def how_ended(code: int) -> str:
    """How a process ended, from its exit code in :mod:`multiprocessing`'s form.

    >>> how_ended(3), how_ended(-9)
    ('ended with exit code 3', 'was killed by SIGKILL')
    """
    return f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
