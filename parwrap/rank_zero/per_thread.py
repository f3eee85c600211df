"""Settings of one thread for its effects on files: whether they run unchanged, and whether every rank writes.

Nothing here imports torch, because the launcher uses it too.
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
    """In the block, this thread's file calls are parwrap's own and run unchanged."""
    here.passing += 1
    try:
        yield
    finally:
        here.passing -= 1


@contextmanager
def every_rank_writing() -> Iterator[None]:
    """In the block, this thread writes for its own rank."""
    here.every_rank += 1
    try:
        yield
    finally:
        here.every_rank -= 1
