"""Intercepts file access in a process that is not a rank, such as a parameter server: only that process sees what it writes.

The process reads what is on the disk. Unlike a replica it never waits, because it has no place in rank 0's script.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from parwrap.intercept.interceptor import intercepts
from parwrap.rank_zero.file_versions import Awaited, Outcome, Record
from parwrap.rank_zero.replica_files import ReplicaFiles

__all__ = ["PrivateFiles"]


class _Nobody(Awaited):
    """Rank 0's announcements for a process that does not read them."""

    def __init__(self) -> None:
        pass

    @property
    def clock(self) -> int:
        return 0

    def record(self, key: str) -> Record | None:
        return None

    def wait(self, key: str, version: int, own: int, needs_it: bool = False) -> tuple[Outcome, Record, int]:
        return Outcome.REPLACED, Record(), version


class PrivateFiles(ReplicaFiles):
    """Keeps this process's changes to files private to it.

    Args:
        rank: the rank of the process.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(rank, _Nobody())

    @intercepts
    def save(self, file: Any, write: Callable[[Any], None]) -> None:
        """``torch.save``: writes to a path like any other call, because no other rank writes a file that this process may load."""
        if isinstance(file, (str, os.PathLike)):
            self.write_native(file, write)
        else:
            write(file)
