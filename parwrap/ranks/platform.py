"""What only some systems have, under one name for Linux, macOS and Windows. On Windows some names do less, or nothing.

``docs/platforms.rst`` says what works where. Nothing here imports torch, because the launcher uses it too.
"""

from __future__ import annotations

import mmap
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

__all__ = [
    "FORKS",
    "KILL",
    "OPEN_OWN",
    "START_METHOD",
    "START_METHODS",
    "WINDOWS",
    "is_private",
    "kill_group",
    "known_signals",
    "lead_group",
    "lock",
    "lock_for_process",
    "open_for_writing",
    "path_of",
    "raise_in_main_thread",
    "read_at",
    "run_after_fork",
    "shared_memory",
    "unlock",
    "unlock_for_process",
    "user",
]

WINDOWS = sys.platform == "win32"

FORKS = sys.platform == "linux"
"""Whether processes are forked by default. On macOS, libraries that torch has loaded may crash in a forked process."""

START_METHOD = "forkserver" if FORKS else "spawn"
"""How :mod:`multiprocessing` starts ranks by default."""

START_METHODS = ("fork", "spawn", "forkserver") if hasattr(os, "fork") else ("spawn",)
"""The start methods of :mod:`multiprocessing` that this system has."""

KILL = getattr(signal, "SIGKILL", signal.SIGTERM)
"""The signal that ends a process at once. On Windows, ``os.kill`` does so with every number."""

OPEN_OWN = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
"""Flags with which parwrap opens its own files: they follow no link, other programs do not inherit them, and bytes stay unchanged."""


def known_signals(*names: str) -> set[signal.Signals]:
    """Those of the named signals that this system has.

    >>> known_signals("SIGINT", "SIGNONE")
    {<Signals.SIGINT: 2>}
    """
    return {signal.Signals[name] for name in names if name in signal.Signals.__members__}


def run_after_fork(run: Callable[[], object]) -> None:
    """Call ``run`` in each process that is forked from this one."""
    if sys.platform != "win32":
        os.register_at_fork(after_in_child=run)


def raise_in_main_thread(number: int) -> None:
    """Send a signal to this process, for its handler. On Windows, ``os.kill`` would end the process instead."""
    if sys.platform == "win32":
        signal.raise_signal(number)
    else:
        os.kill(os.getpid(), number)


def lead_group() -> None:
    """Let this process lead a process group, so that :func:`kill_group` reaches what it starts."""
    if sys.platform != "win32":
        os.setpgid(0, 0)


def kill_group(process: int) -> None:
    """Kill ``process`` and its group; on Windows, the process alone."""
    with suppress(ProcessLookupError, PermissionError):
        if sys.platform == "win32":
            os.kill(process, signal.SIGTERM)
        else:
            os.killpg(process, signal.SIGKILL)


def user() -> int:
    """The number of this user; 0 on Windows, where each user has a separate folder for temporary files."""
    if sys.platform == "win32":
        return 0
    return os.getuid()


def is_private(found: os.stat_result) -> bool:
    """Whether only this user can access what has the status ``found``. On Windows it is true, because the folder above decides."""
    return WINDOWS or (found.st_uid == user() and not found.st_mode & 0o077)


def shared_memory(path: Path, size: int) -> mmap.mmap:
    """``size`` bytes that are shared with all processes that map the file at ``path``, which is made if it does not exist."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | OPEN_OWN, 0o600)
    try:
        if os.fstat(descriptor).st_size != size:  # Windows sets no size once another process has mapped the file
            os.ftruncate(descriptor, size)
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


_reading = threading.Lock()


def read_at(descriptor: int, size: int, offset: int) -> bytes:
    """``size`` bytes at ``offset`` of a file; on POSIX, processes that have forked may share the descriptor."""
    if sys.platform != "win32":
        return os.pread(descriptor, size, offset)
    with _reading:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.read(descriptor, size)


def path_of(descriptor: int) -> str:
    """The path of the open file or folder, its last one if it is removed.

    >>> descriptor = os.open(os.sep, os.O_RDONLY)
    >>> path_of(descriptor)
    '/'
    >>> os.close(descriptor)
    """
    is_removed = os.fstat(descriptor).st_nlink == 0
    if sys.platform == "darwin":
        return os.fsdecode(fcntl.fcntl(descriptor, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0"))
    path = os.readlink(f"/proc/self/fd/{descriptor}")
    return path.removesuffix(" (deleted)") if is_removed else path


def open_for_writing(process: int) -> set[str]:
    """The paths of the files that the process has open for writing; none where the system has no ``/proc``.

    >>> with open(os.devnull, "w"):
    ...     os.devnull in open_for_writing(os.getpid()) or not FORKS
    True
    """
    found, folder = set(), f"/proc/{process}/fd"
    with suppress(OSError):
        for each in os.listdir(folder):
            with suppress(OSError):  # it is closed
                if os.lstat(link := f"{folder}/{each}").st_mode & stat.S_IWUSR:
                    found.add(os.readlink(link))
    return found


if sys.platform == "win32":
    import msvcrt
    import secrets

    EVERY_BYTE = 2**31 - 1

    def lock(descriptor: int, shared: bool = False, wait: bool = True) -> None:
        """Lock an open file until it is closed: an exclusive lock takes all bytes, a shared lock one byte at random."""
        place, size = (secrets.randbelow(EVERY_BYTE), 1) if shared else (0, EVERY_BYTE)
        while True:
            os.lseek(descriptor, place, os.SEEK_SET)
            try:
                return msvcrt.locking(descriptor, msvcrt.LK_NBLCK, size)
            except OSError:
                if not wait:
                    raise
            time.sleep(0.005)

    def unlock(descriptor: int) -> None:
        """Do nothing: closing the file releases the lock, and no forked process has the file."""

    def lock_for_process(descriptor: int) -> None:
        lock(descriptor)

    def unlock_for_process(descriptor: int) -> None:
        os.lseek(descriptor, 0, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_UNLCK, EVERY_BYTE)

else:
    import fcntl

    def lock(descriptor: int, shared: bool = False, wait: bool = True) -> None:
        """Lock an open file until :func:`unlock`, or until all processes that have it open close it.

        Shared locks exclude only exclusive ones.

        Raises:
            OSError: another process has locked it, and this one does not ``wait``.
        """
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))

    def unlock(descriptor: int) -> None:
        """Release the lock, also for processes that were forked since."""
        fcntl.flock(descriptor, fcntl.LOCK_UN)

    def lock_for_process(descriptor: int) -> None:
        """Lock an open file until this process unlocks it or ends. Processes that it forks do not hold the lock."""
        fcntl.lockf(descriptor, fcntl.LOCK_EX)

    def unlock_for_process(descriptor: int) -> None:
        """Release the lock of :func:`lock_for_process`."""
        fcntl.lockf(descriptor, fcntl.LOCK_UN)
