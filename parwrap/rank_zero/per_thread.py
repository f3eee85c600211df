"""What holds for one thread's effects on files: whether they pass as they are, and whether every rank is to have its own.

Nothing here imports torch: the launcher's side uses it too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["every_rank_writing", "here", "passing"]


class _Here(threading.local):
    """How many blocks of either kind this thread is in."""

    passing = 0
    every_rank = 0


here = _Here()


@contextmanager
def passing() -> Iterator[None]:
    """What this thread does to files in the block is parwrap's own: it is passed on as it is."""
    here.passing += 1
    try:
        yield
    finally:
        here.passing -= 1


@contextmanager
def every_rank_writing() -> Iterator[None]:
    """In the block this thread writes for its own rank."""
    here.every_rank += 1
    try:
        yield
    finally:
        here.every_rank -= 1
