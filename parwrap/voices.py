"""The actors on output: rank 0 speaks, and of the other ranks only errors are heard and what is printed with ``force=True``.

What becomes of files is left to ``files/``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

__all__ = ["Voice", "Voices"]


class Voice:
    """What a single rank needs: ``print`` takes ``force=`` there too."""

    def speak(self, say: Callable[..., None], file: TextIO | None, force: bool) -> None:
        say()


class Voices:
    """Lets rank 0 speak for all.

    Args:
        rank: this rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._streams = (sys.stdout, sys.stderr)

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """Above rank 0, what is written to stdout and stderr is dropped: by print, tqdm, warnings and logging alike."""
        if self._rank == 0:
            yield
            return
        with open(os.devnull, "w") as out, open(os.devnull, "w") as err, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            yield

    def speak(self, say: Callable[..., None], file: TextIO | None, force: bool) -> None:
        """``print``; with ``force=True`` on every rank."""
        if self._rank == 0 or not force:
            say()
        elif file in (None, sys.stdout, sys.stderr):
            stdout, stderr = self._streams
            say(file=stderr if file is sys.stderr else stdout, flush=True)
        else:
            say()

    def log(self, record: logging.LogRecord, handle: Callable[[], None]) -> None:
        """A log record: rank 0's go where they went; of the others only errors are heard, with their rank."""
        if self._rank == 0:
            handle()
        elif record.levelno >= logging.ERROR:
            text = logging.Formatter("%(levelname)s:%(name)s:%(message)s").format(record)
            print(f"[rank {self._rank}] {text}", file=self._streams[1], flush=True)
