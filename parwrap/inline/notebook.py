"""Shows the output of started ranks where this process shows its output, such as in the cell of a notebook.

If this process writes directly to its stdout and stderr, the ranks inherit both and write directly too.
"""

from __future__ import annotations

import codecs
import io
import logging
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any, TextIO

__all__ = ["ChildOutput", "logging_handlers", "redirect_output", "show_in_notebook"]

CHUNK = 1 << 16


class ChildOutput:
    """The output of one rank, until :meth:`close`.

    Attributes:
        outputs: descriptors that the rank writes to, by the numbers of its stdout and stderr. :meth:`started` closes them here.
        sources: descriptors from which this process reads the rank's output.
    """

    def __init__(self) -> None:
        self.outputs: dict[int, int] = {}
        self._streams: dict[int, tuple[Any, codecs.IncrementalDecoder]] = {}
        for number, stream in ((1, sys.stdout), (2, sys.stderr)):
            if not _is_own(stream, number):
                ours, self.outputs[number] = os.pipe()
                self._streams[ours] = stream, codecs.getincrementaldecoder("utf-8")(errors="replace")

    @property
    def sources(self) -> list[int]:
        return list(self._streams)

    def started(self) -> None:
        """Close this process's copies of the descriptors, because the rank has them."""
        while self.outputs:
            os.close(self.outputs.popitem()[1])

    def show(self) -> None:
        """Forward the output that has arrived."""
        while ready := wait(self.sources, 0):
            for source in ready:
                stream, decoder = self._streams[source]  # type: ignore[index]
                data = os.read(source, CHUNK)  # type: ignore[arg-type]
                if not data:
                    self._forget(source)  # type: ignore[arg-type]
                stream.write(decoder.decode(data, final=not data))
                stream.flush()

    def close(self) -> None:
        self.started()
        for source in self.sources:
            self._forget(source)

    def _forget(self, source: int) -> None:
        del self._streams[source]
        os.close(source)


def redirect_output(outputs: Mapping[int, int]) -> None:
    """In a rank, replace stdout and stderr by ``outputs``, where given. Write line by line, because the rank may be killed at any time."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if number in outputs:
            os.dup2(outputs[number], number)
            stream = open(number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
            _have_loggers_write(stream, (getattr(sys, name), getattr(sys, f"__{name}__")))
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        else:
            with suppress(AttributeError, ValueError):
                getattr(sys, name).reconfigure(line_buffering=True)


def show_in_notebook(rank: int) -> None:
    """In a rank forked by a notebook's kernel, show plots and other rich output on rank 0, and drop them on other ranks."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    session = getattr(getattr(shell, "display_pub", None), "session", None)
    if session is None:
        return
    if rank == 0:
        session.check_pid = False  # ipykernel's sending function handles forks
    else:
        session.send = lambda *args, **options: None


def logging_handlers() -> list[Any]:
    """All handlers of :mod:`logging` in this process."""
    return [handler for known in list(logging._handlerList) if (handler := known()) is not None]  # type: ignore[attr-defined]


def _have_loggers_write(stream: TextIO, before: tuple[TextIO, ...]) -> None:
    """Make logging handlers that write to a stream in ``before`` write to ``stream``: what a rank writes to the old ones is not shown."""
    for handler in logging_handlers():
        if isinstance(handler, logging.StreamHandler) and any(handler.stream is each for each in before):
            with suppress(AttributeError):  # of handlers that look up sys.stderr each time
                handler.stream = stream  # setStream would flush the caller's buffer


def _is_own(stream: Any, number: int) -> bool:
    """Whether ``stream`` writes to the descriptor ``number`` of this process, or is ``None``."""
    if stream is None:
        return True
    with suppress(AttributeError, OSError, ValueError):
        return isinstance(stream, io.TextIOWrapper) and stream.fileno() == number
    return False
