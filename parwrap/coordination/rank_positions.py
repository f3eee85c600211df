"""Where every rank is, for the report of a hang and for errors: read from what the ranks have written of their meetings."""

from __future__ import annotations

import time
from collections.abc import Sequence

from parwrap.coordination.status_board import Entry, Mailbox, State
from parwrap.coordination.subgroup_sync import Lane

__all__ = ["Whereabouts"]


class Whereabouts:
    """Looks up all ranks, from any thread.

    Args:
        mailbox: what the ranks have written.
        lanes: that they may be in within a meeting.
    """

    def __init__(self, mailbox: Mailbox, lanes: Sequence[Lane]) -> None:
        self._mailbox, self._lanes = mailbox, lanes
        self._ranks = range(mailbox.world.size)

    def told(self, but: int | None = None) -> str:
        """Where every rank is, in one sentence each; all ``but`` that one."""
        lines = []
        for rank in self._ranks:
            if rank == but:
                continue
            entry, inside = self._last(rank)
            where = self._mailbox.where[rank]
            if entry is None:
                state = "has met nobody yet"
            elif entry.state is State.FAILED:
                state = f"has failed with {entry.meeting}"
            elif inside:
                state = f"is in {entry.meeting} for {time.time() - entry.since:.0f} s"
            else:
                state = f"has left {entry.meeting} and is in the script" + (f" at {where}" if where else "")
            lines.append(f"Rank {rank} {state}.")
        return " ".join(lines)

    def waited(self, seconds: float) -> bool:
        """Whether any rank has been in a meeting for longer than that."""
        now = time.time()
        return any(entry and inside and now - entry.since > seconds for entry, inside in map(self._last, self._ranks))

    def tell(self, place: str) -> None:
        """Let the others know that this rank is at ``place`` in its script."""
        self._mailbox.tell_where(place)

    def _last(self, rank: int) -> tuple[Entry | None, bool]:
        """The last meeting that ``rank`` has entered, and whether it is still in there."""
        beside = next((entry for lane in self._lanes if (entry := lane.inside(rank))), None)
        return (beside, True) if beside else self._mailbox.last(rank)
