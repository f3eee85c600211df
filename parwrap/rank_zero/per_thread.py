"""Per-thread settings for file access: whether calls run unchanged, and whether every rank writes.

Nothing here imports torch, because the launcher uses it too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["every_rank_writing", "here", "passing"]


class _Here(threading.local):
    """The number of blocks of each kind that this thread is in."""

    passing = 0
    every_rank = 0


here = _Here()


@contextmanager
def passing() -> Iterator[None]:
    """Let this thread's file calls run unchanged inside the block, because they are parwrap's own."""
    here.passing += 1
    try:
        yield
    finally:
        here.passing -= 1


@contextmanager
def every_rank_writing() -> Iterator[None]:
    """Let this thread write files on every rank inside the block."""
    here.every_rank += 1
    try:
        yield
    finally:
        here.every_rank -= 1
