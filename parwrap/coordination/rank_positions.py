"""The position of every rank, for hang reports and errors: read from what the ranks have written about their sync points."""

from __future__ import annotations

import time
from collections.abc import Sequence

from parwrap.coordination.status_board import Entry, State, StatusBoard
from parwrap.coordination.subgroup_sync import NestedCoordinator

__all__ = ["RankPositions"]


class RankPositions:
    """Looks up all ranks, from any thread.

    Args:
        status_board: the entries of the ranks.
        nested_coordinators: the coordinators of nested sync points.
        run_ahead: whether hosts leave a sync point before the others have come, as with GPUs.
    """

    def __init__(self, status_board: StatusBoard, nested_coordinators: Sequence[NestedCoordinator], run_ahead: bool = False) -> None:
        self._status_board, self._nested, self._run_ahead = status_board, nested_coordinators, run_ahead
        self._ranks = range(status_board.world.size)

    def described(self, but: int | None = None) -> str:
        """The position of every rank except ``but``, in one sentence each."""
        lines = []
        for rank in self._ranks:
            if rank == but:
                continue
            entry, inside = self._last(rank)
            where = self._status_board.where[rank]
            if entry is None:
                state = "has reached no sync point yet"
            elif entry.state is State.FAILED:
                state = f"failed with {entry.sync_point}"
            elif inside:
                state = f"has been in {entry.sync_point} for {time.time() - entry.since:.0f} s"
            else:
                state = f"has left {entry.sync_point} and is in the script" + (f" at {where}" if where else "")
            lines.append(f"Rank {rank} {state}.")
        return " ".join(lines)

    def waited(self, seconds: float) -> bool:
        """Whether any rank has been in a sync point for longer than that, or has left one that another has not reached since."""
        now = time.time()
        return any(entry and inside and now - entry.since > seconds for entry, inside in map(self._last, self._ranks)) or (
            self._run_ahead and self._is_ahead(now - seconds)
        )

    def _is_ahead(self, since: float) -> bool:
        """Whether a rank is ahead of another and has reached no sync point ``since``: its GPU waits, and so may its host, in ``item()``."""
        entries = [self._status_board.last(rank)[0] for rank in self._ranks]
        least = min(entry.number if entry else 0 for entry in entries)
        return any(entry and entry.number > least and entry.since < since for entry in entries)

    def publish_place(self, place: str) -> None:
        """Publish that this rank is at ``place`` in its script."""
        self._status_board.publish_place(place)

    def _last(self, rank: int) -> tuple[Entry | None, bool]:
        """The last sync point that ``rank`` has entered, and whether it is still in it."""
        nested_entry = next((entry for nested in self._nested if (entry := nested.inside(rank))), None)
        return (nested_entry, True) if nested_entry else self._status_board.last(rank)
