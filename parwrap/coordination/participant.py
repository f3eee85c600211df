"""What a coordinator needs from the strategy that trains on this rank.

The methods here are the defaults for a rank that does not train together with others. Strategies override them where needed.
"""

from __future__ import annotations

from collections.abc import Collection

__all__ = ["Participant"]


class Participant:
    """Takes part in the sync points of a :class:`Coordinator`, from its ``join`` on until another part of the run begins."""

    def phase(self) -> int:
        """The phase of this rank's script, as a number that only grows.

        Ranks in different phases do not synchronize, but those that are ahead answer the others.
        """
        return 0

    def take_state(self, source: int) -> None:
        """Make the stale ranks copy the state of rank ``source``. This is called on all ranks."""

    def others_progress(self) -> bool:
        """Whether this rank, which has waited too long, should keep waiting because the other ranks continue without it."""
        return False

    def set_waiting(self, waiting: bool, step: int = 0) -> None:
        """Called when this rank begins or stops waiting for others.

        Args:
            waiting: whether it begins.
            step: the step of another rank that this delays.
        """

    def lost(self) -> Collection[int]:
        """The ranks that have died."""
        return ()
