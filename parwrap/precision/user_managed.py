"""The message, shown once, when a script does a part of mixed precision itself."""

from __future__ import annotations

import functools

from parwrap.group.group import is_rank_zero
from parwrap.system.progress_bars import write_line

__all__ = ["stand_aside", "warn_once"]


@functools.cache
def stand_aside(what: str, consequence: str) -> None:
    """Warn once that the script does ``what`` itself, however often it does so."""
    warn_once(
        f"this script uses {what} itself, so parwrap.amp leaves it alone: {consequence}. To let parwrap do it, remove it from the script."
    )


@functools.cache
def warn_once(text: str) -> None:
    """Print ``text`` on rank 0's stderr."""
    if is_rank_zero():
        write_line(f"parwrap: {text}")
