"""Says once that all ranks compute the same, so that several are no faster than one: their losses are equal step after step."""

from __future__ import annotations

from collections.abc import Callable

from parwrap.places import Place

__all__ = ["WHOLE_WORK", "SameWork"]

STEPS = 3
"""The number of first steps at a line whose losses are compared. If all of them are equal, this is no accident."""

WHOLE_WORK = "each does the whole work"
"""What the check says of ranks that compute the same."""

TOLERANCE = 1e-6


class SameWork:
    """Compares this rank's loss with the mean over the ranks in the first steps of each line that calls ``backward``.

    Args:
        say: prints a line on rank 0.

    >>> work = SameWork(print)
    >>> for loss in (0.5, 0.25, 0.125):
    ...     work.compare(Place("train.py", 9), loss, loss)
    all ranks compute the same losses at train.py:9: each does the whole work, which is right but no faster than one process. ...
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._seen: dict[Place, list[bool]] = {}
        self._said = False

    def watches(self, place: Place) -> bool:
        """Whether losses at the line ``place`` are still compared."""
        return not self._said and len(self._seen.get(place, ())) < STEPS

    def compare(self, place: Place, loss: float, mean: float, pass_at: Place | None = None, why_whole: str = "") -> None:
        """Compare this rank's ``loss`` in a step at the line ``place`` with the ``mean`` over the ranks.

        If they are equal in the first steps of a line, say once that all ranks compute the same: because of ``why_whole`` if the step is in
        a pass at ``pass_at`` that every rank reads whole.
        """
        seen = self._seen.setdefault(place, [])
        seen.append(loss != 0 and abs(loss - mean) <= TOLERANCE * abs(mean))
        if len(seen) == STEPS and all(seen):
            self._said = True
            remedy = (
                f"Every rank reads everything in the pass at {pass_at}: {why_whole}. parwrap.shard(loader) gives each rank a share in "
                "every pass; a loop that has trained gets shares from its next pass on"
                if why_whole
                else "parwrap.shard(loader) gives each rank a share of a loader; "
                'draws="per_rank" (--draws per-rank) gives each rank random batches of its own, in a loop that draws its batches by hand'
            )
            what = f"{WHOLE_WORK}, which is right but no faster than one process"
            self._say(f"all ranks compute the same losses at {place}: {what}. {remedy}")
