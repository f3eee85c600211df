"""An open file that reports its close, whether by ``close()``, a ``with`` block or garbage collection.

It has the same layers as the result of ``open``; only the innermost is a subclass.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from parwrap.intercept.disk import Opening

__all__ = ["is_too_large", "is_valid", "opened", "writes"]

MOST_UPDATED = 2**28
"""The maximum size, in bytes, of a file that ranks other than 0 copy in order to change it, such as a database."""


class _Watched(io.FileIO):
    """A raw file that calls ``closed`` once, after it has been closed."""

    _on_close: Callable[[], None] | None = None

    def watch(self, closed: Callable[[], None], name: Any) -> None:
        self._on_close = closed
        self.name = name

    def close(self) -> None:
        on_close, self._on_close = self._on_close, None
        try:
            super().close()
        finally:
            if on_close:
                on_close()


def writes(mode: Any) -> bool:
    """Whether ``open`` with this ``mode`` may change the file.

    >>> writes("rb"), writes("r+"), writes("at")
    (False, True, True)
    """
    return isinstance(mode, str) and not {"w", "a", "x", "+"}.isdisjoint(mode)


def is_too_large(path: Any) -> bool:
    """Whether the file at ``path`` is too large for ranks other than 0 to copy in order to change it."""
    with suppress(OSError):
        return os.path.getsize(path) > MOST_UPDATED
    return False


def is_valid(call: Opening) -> bool:
    """Whether ``open`` accepts the arguments of ``call`` together."""
    kinds = set(call.mode)
    return (
        len(kinds) == len(call.mode)
        and kinds <= set("rwaxbt+")
        and len(kinds & set("rwax")) == 1
        and not {"b", "t"} <= kinds
        and ("b" not in kinds or (call.encoding, call.errors, call.newline) == (None, None, None))
    )


def opened(call: Opening, file: Any, closed: Callable[[], None]) -> Any:
    """The result of ``call`` for the path or file descriptor ``file``; it calls ``closed`` after it was closed.

    Its ``name`` is the one in ``call``.
    """
    mode, buffering = call.mode, call.buffering
    text = "b" not in mode
    raw = _Watched(file, mode.replace("t", ""))
    stream: Any = raw
    try:
        if buffering == 0 and text:
            raise ValueError("can't have unbuffered text I/O")
        if buffering != 0:
            size = buffering if buffering > 1 else max(getattr(raw, "_blksize", 0), io.DEFAULT_BUFFER_SIZE)
            stream = io.BufferedRandom(raw, size) if "+" in mode else io.BufferedWriter(raw, size)
        if text:
            stream = io.TextIOWrapper(stream, call.encoding, call.errors, call.newline, line_buffering=buffering == 1 or raw.isatty())
            stream.mode = mode
    except BaseException:
        raw.close()
        raise
    raw.watch(closed, call.file)
    return stream
