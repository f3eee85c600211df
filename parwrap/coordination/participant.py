"""What a coordinator asks of the strategy that trains on this rank.

The methods here are the answers of a rank that trains nothing together with others; strategies override what concerns them.
"""

from __future__ import annotations

from collections.abc import Collection

__all__ = ["Participant"]


class Participant:
    """Takes part in the sync points of a :class:`Coordinator`, from its ``join`` on until another part of the run begins."""

    def phase(self) -> int:
        """How far this rank's script has come, as a number that grows.

        Ranks in different phases do not synchronize, but those who are ahead answer the others.
        """
        return 0

    def take_state(self, source: int) -> None:
        """Have the ranks that are stale take over the state of rank ``source``; called on all ranks."""

    def others_progress(self) -> bool:
        """Whether the others get on without this rank, which has waited too long, so that it shall wait on."""
        return False

    def set_waiting(self, waiting: bool, step: int = 0) -> None:
        """This rank begins or ends to wait for others.

        Args:
            waiting: whether it begins.
            step: of another rank that is held up by that.
        """

    def lost(self) -> Collection[int]:
        """The ranks that have died."""
        return ()
