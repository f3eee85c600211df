"""What processes that are started here do about each other's ends. Nothing here imports torch: the launcher's side uses it too."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["die_with_parent", "how_ended", "signal_name"]


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends, however that ends (on Linux).

    Args:
        parent: the process that it was started by, which may have ended by now.
    """
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def signal_name(number: int) -> str:
    """What a signal is called.

    >>> signal_name(9), signal_name(35)
    ('SIGKILL', 'signal 35')
    """
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def how_ended(code: int) -> str:
    """What became of a process, by its exit code as :mod:`multiprocessing` has it.

    >>> how_ended(3), how_ended(-9)
    ('ended with exit code 3', 'was killed by SIGKILL')
    """
    return f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
