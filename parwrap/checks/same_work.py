"""Says once that all ranks compute the same, so that several are no faster than one: their losses are equal step after step."""

from __future__ import annotations

from collections.abc import Callable

from parwrap.loop.optimizers import Optimizers
from parwrap.loop.passes import Passes
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
        passes: the open passes.
        optimizers: the optimizers of the script.
        say: prints a line on rank 0.
    """

    def __init__(self, passes: Passes, optimizers: Optimizers, say: Callable[[str], None]) -> None:
        self._passes, self._optimizers, self._say = passes, optimizers, say
        self._seen: dict[Place, list[bool]] = {}
        self._done = False

    def gathers(self) -> None:
        """Note that losses are those of all ranks' features, which are equal although the work is not: compare no more."""
        self._done = True

    def watches(self, place: Place) -> bool:
        """Whether to compare losses at the line ``place``, which is not in a pass over shares.

        Not in an evaluation, where no optimizer steps. A script without an optimizer may step by hand.
        """
        if self._done or len(self._seen.get(place, ())) >= STEPS:
            return False
        innermost = self._passes.innermost
        return innermost is None or innermost.trains or innermost.trained or not self._optimizers.were_built

    def compare(self, place: Place, loss: float, mean: float) -> None:
        """Compare this rank's ``loss`` in a step at the line ``place`` with the ``mean`` over the ranks.

        If they are equal in the first steps of a line, say once that all ranks compute the same, why, and what changes it.
        """
        seen = self._seen.setdefault(place, [])
        seen.append(loss != 0 and abs(loss - mean) <= TOLERANCE * abs(mean))
        if len(seen) == STEPS and all(seen):
            self._done = True
            what = f"{WHOLE_WORK}, which is right but no faster than one process"
            self._say(f"all ranks compute the same losses at {place}: {what}. {self._why()}")

    def _why(self) -> str:
        """Why the ranks compute the same, and what changes it."""
        innermost = self._passes.innermost
        if innermost is not None and innermost.rows is not None:
            return (
                f"The batches at {innermost.place} are whole, but what follows is computed from collected rows: parwrap explain names the "
                "lines that collect them"
            )
        if innermost is not None and innermost.why_whole:
            later = "; a loop that has trained gets shares from its next pass on" if self._optimizers.were_built else ""
            return (
                f"Every rank reads everything in the pass at {innermost.place}: {innermost.why_whole}. parwrap.shard(loader) gives each "
                f"rank a share in every pass{later}"
            )
        if innermost is not None:
            return f"parwrap.replicate(loader) lets every rank read everything in the pass at {innermost.place}: remove it for shares"
        read = self._passes.whole_at
        from_loader = f"If the batches come from the loader read at {read}, parwrap.shard(loader) gives shares" if read else ""
        if self._passes.draws_own:
            why = 'No DataLoader of torch is read there, and with draws="per_rank" what is drawn before the first backward is alike'
            remedy = "Draw an order of batches after it, or from a generator that is seeded with parwrap.rank()"
        else:
            why = "No DataLoader of torch is read there, and ranks draw alike"
            remedy = (
                'draws="per_rank" (--draws per-rank) gives each rank random batches of its own, if the loop draws its batches by hand and '
                "takes the same steps whatever it draws"
            )
        return ". ".join(each for each in (why, remedy, from_loader) if each)
