"""``with every_rank_writes():`` for files that each rank writes separately."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from parwrap.decorator import ScopeDecorator
from parwrap.rank_zero.per_thread import every_rank_writing

__all__ = ["every_rank_writes"]


class every_rank_writes(ScopeDecorator):
    """Let every rank, not only rank 0, write files in the block. Use a different path on each rank.

    Write ``with every_rank_writes():`` or ``@every_rank_writes``. Paths written in the block, and everything below directories made in it,
    stay the rank's own afterwards. It applies to the thread that opens it.

    >>> import json, tempfile, parwrap
    >>> with tempfile.TemporaryDirectory() as folder, parwrap.every_rank_writes():
    ...     with open(f"{folder}/losses-{parwrap.rank()}.json", "w") as file:
    ...         json.dump([0.5], file)
    """

    def __init__(self) -> None:
        super().__init__()

    def scope(self, function: Callable[..., Any] | None) -> AbstractContextManager[Any]:
        return every_rank_writing()
