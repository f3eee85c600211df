"""Says once that all ranks compute the same, so that several are no faster than one: their losses are equal step after step."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["SameWork"]

STEPS = 3
"""So many equal losses in a row are no accident."""

TOLERANCE = 1e-6


class SameWork:
    """Compares this rank's loss with the mean over the ranks in the first steps.

    Args:
        say: prints a line on rank 0.

    Attributes:
        done: whether enough steps were compared.

    >>> work = SameWork(print)
    >>> for loss in (0.5, 0.25, 0.125):
    ...     work.compare(loss, loss)
    all ranks compute the same losses: each does the whole work, which is right but no faster than one process. parwrap.shard(loader) ...
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._compared = self._equal = 0
        self.done = False

    def compare(self, loss: float, mean: float) -> None:
        """Compare the losses of a step."""
        self._compared += 1
        self.done = self._compared == STEPS
        self._equal += loss != 0 and abs(loss - mean) <= TOLERANCE * abs(mean)
        if self._equal == STEPS:
            self._say(
                "all ranks compute the same losses: each does the whole work, which is right but no faster than one process. "
                'parwrap.shard(loader) gives each rank a share of a loader; draws="per_rank" (--draws per-rank) gives it random batches of '
                "its own, in a loop that draws its batches by hand"
            )
