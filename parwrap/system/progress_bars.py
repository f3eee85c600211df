"""Lines on stderr next to progress bars of tqdm, which are cleared for a line and drawn again below it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["bars_cleared", "write_line"]


@contextmanager
def bars_cleared() -> Iterator[None]:
    """Clear tqdm progress bars on stdout and stderr inside the block."""
    tqdm: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if not getattr(tqdm, "_instances", None):
        yield
        return
    with tqdm.external_write_mode(file=sys.stderr):
        yield


def write_line(line: str) -> None:
    """Write ``line`` to stderr, on a separate line."""
    with bars_cleared():
        print(line, file=sys.stderr)
