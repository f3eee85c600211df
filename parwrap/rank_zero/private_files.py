"""The interceptor of files in a process beside the ranks, as a parameter server is: what it writes, only it sees.

It reads what is on the disk. Unlike a clone it waits for nobody, since rank 0 does not know how far it has come.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from parwrap.intercept.interceptor import intercepts
from parwrap.rank_zero.file_overlay import FileOverlay
from parwrap.rank_zero.file_versions import Awaited, Outcome, Record
from parwrap.rank_zero.path_rules import PathRules
from parwrap.rank_zero.replica_files import ReplicaFiles

__all__ = ["PrivateFiles"]


class _Nobody(Awaited):
    """Rank 0, as seen by who does not listen to it."""

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
    """Keeps effects on files to this process.

    Args:
        rank: of the process.
    """

    def __init__(self, rank: int) -> None:
        self._places = PathRules(rank)
        self._view = FileOverlay(_Nobody(), self._places)
        self._descriptors: dict[int, str] = {}

    @intercepts
    def save(self, file: Any, write: Callable[[Any], None]) -> None:
        """``torch.save``: to a path it writes as any other, since nobody else writes what is loaded here."""
        if isinstance(file, (str, os.PathLike)):
            self.write_native(file, write)
        else:
            write(file)
