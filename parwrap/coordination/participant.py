"""What a coordinator needs from the strategy that trains on this rank.

The methods here are the answers of a rank that trains nothing together with others; strategies override those that differ.
"""

from __future__ import annotations

from collections.abc import Collection

__all__ = ["Participant"]


class Participant:
    """Takes part in the sync points of a :class:`Coordinator`, from its ``join`` on until another part of the run begins."""

    def phase(self) -> int:
        """The progress of this rank's script, as a number that grows.

        Ranks in different phases do not synchronize, but those that are ahead answer the others.
        """
        return 0

    def take_state(self, source: int) -> None:
        """Make the stale ranks copy the state of rank ``source``; called on all ranks."""

    def others_progress(self) -> bool:
        """Whether the others continue without this rank, which has waited too long, so that it should keep waiting."""
        return False

    def set_waiting(self, waiting: bool, step: int = 0) -> None:
        """This rank begins or stops waiting for others.

        Args:
            waiting: whether it begins.
            step: the step of another rank that this delays.
        """

    def lost(self) -> Collection[int]:
        """The ranks that have died."""
        return ()
