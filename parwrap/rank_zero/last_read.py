"""The file that a thread has opened last, to say of an error whether another process has changed that file in the meantime."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from typing import Any

from parwrap.rank_zero.path_rules import passing
from parwrap.ranks.platform import open_for_writing

__all__ = ["LastRead"]

PATIENCE = 0.3
"""Seconds to wait for a process that has emptied a file and is about to write it."""


class LastRead(threading.local):
    """The file that this thread has opened last; nothing if it has opened that to write."""

    _path: Any = None
    _found: os.stat_result | None = None

    def opened(self, path: Any, stream: Any, writes: bool) -> None:
        """Record that this thread has opened ``path`` as ``stream``."""
        self._path, self._found = path, None
        if not writes:
            with suppress(OSError, AttributeError):  # it is no file of the system
                self._found = os.fstat(stream.fileno())

    def changed(self) -> str | None:
        """The name of the file if another process has changed it since. One that was replaced, or that is in scratch, has not changed."""
        until = time.monotonic() + PATIENCE
        with suppress(OSError, TypeError, ValueError), passing():
            while self._found is not None and not isinstance(self._path, int):
                now = os.stat(self._path)
                if not os.path.samestat(now, self._found) or os.path.realpath(self._path) in open_for_writing(os.getpid()):
                    break
                if (now.st_size, now.st_mtime_ns) != (self._found.st_size, self._found.st_mtime_ns):
                    return os.path.basename(os.fsdecode(self._path))
                if time.monotonic() > until:
                    break
                time.sleep(0.01)
        return None
