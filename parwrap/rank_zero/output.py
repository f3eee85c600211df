"""Intercepts output: rank 0 prints; the other ranks show only errors and what they print with ``force=True``.

A launcher may show all ranks: see ``launching/elastic/rank_output.py``. The other interceptors of this room handle files.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TextIO

from parwrap.coordination.call_site import outside
from parwrap.intercept.interceptor import Interceptor, intercepts
from parwrap.system.progress_bars import bars_cleared

__all__ = ["RankZeroOutput", "Voice", "settle"]

_everyone, _log_only = False, os.devnull


def settle(everyone: bool, log_only: str) -> None:
    """Set whether ``everyone`` prints in this process; if not, ``log_only`` is the file for the output of silent ranks."""
    global _everyone, _log_only
    _everyone, _log_only = everyone, log_only


class Voice(Interceptor):
    """Lets ``print`` accept ``force=`` on a single rank too."""

    @intercepts
    def speak(self, say: Callable[..., None], file: TextIO | None, force: bool) -> None:
        say()


class RankZeroOutput(Voice):
    """Lets rank 0 print for all ranks.

    Args:
        rank: this rank.
    """

    def __init__(self, rank: int) -> None:
        self._process = os.getpid()
        self._rank, self._speaks = rank, rank == 0 or _everyone
        self._streams = (sys.stdout, sys.stderr)

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """On ranks other than 0, redirect stdout and stderr, which covers print, tqdm, warnings and logging."""
        if self._speaks:
            yield
            return
        with open(_log_only, "w", buffering=1) as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            yield

    @intercepts
    def speak(self, say: Callable[..., None], file: TextIO | None, force: bool) -> None:
        """Run ``print`` on rank 0, and with ``force=True`` on every rank."""
        if self._speaks or not force:
            say()
        elif file in (None, sys.stdout, sys.stderr):
            stdout, stderr = self._streams
            say(file=stderr if file is sys.stderr else stdout, flush=True)
        else:
            say()

    @intercepts
    def log(self, record: logging.LogRecord, handle: Callable[[], None]) -> None:
        """Handle a log record: unchanged on rank 0; other ranks show only errors, with their rank."""
        if self._speaks:
            handle()
        elif record.levelno >= logging.ERROR:
            text = logging.Formatter("%(levelname)s:%(name)s:%(message)s").format(record)
            print(f"[rank {self._rank}] {text}", file=self._streams[1], flush=True)

    @intercepts
    def points_to(self, caller: FrameType, stacklevel: int) -> int:
        """The stack level of the line that a warning is about, because a patched function has frames of parwrap above it."""
        return outside(caller, stacklevel)

    @intercepts
    def show_warning(self, show: Callable[[], None]) -> None:
        # a forked process has copies of the bars, and of a lock that another thread may hold
        with bars_cleared() if os.getpid() == self._process else contextlib.nullcontext():
            show()
