"""On the batches of which passes a step trains (contract, small print on passes)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from parwrap.loop.one_pass import Pass

__all__ = ["Steps"]

MOST_ENDED = 64
"""How many ended passes may wait for a step: a script without optimizers never steps."""


class Steps:
    """Counts in each pass the steps on its batches.

    A step trains on the batch that an open pass has drawn last, and on those that others have drawn since the step before if these belong
    together: one pass began while the other waited for a step. A validation batch that is drawn after each step does not. It also trains
    on those of training passes inside of the open ones that the loop has left. If no pass is open, it trains on those of all training
    passes that have ended since, and of the pass that ended last, if the loop left them or ran a backward in them. An optimizer that was
    built for the last batch trains what belongs to this batch, such as an attack, and not on the loader.

    Args:
        opened: the open passes, innermost last; the owner of the list changes it.

    Attributes:
        ended: the passes that have ended since the last step, and may have drawn batches for the next one.
        computing_for: inside the closure of a step, how many batches had been drawn when its optimizer was built; ``None`` outside.
    """

    def __init__(self, opened: list[Pass]) -> None:
        self._open = opened
        self.ended: list[Pass] = []
        self.computing_for: int | None = None

    def begins(self, opened: Pass, modes: int) -> None:
        """Note that ``opened`` begins, before it is open and after ``modes`` changes of modes. Passes that wait for a step may share it."""
        for each in self._open:
            if _may_share(each, modes):
                each.together = opened.together = True

    def ends(self, closed: Pass) -> None:
        """Note that ``closed`` ends."""
        if not closed.after_eval and (closed.backwards or closed.in_thread or not closed.exhausted):
            self.ended = [*self.ended[1 - MOST_ENDED :], closed]

    def awaits(self, ended: Pass) -> bool:
        """Whether ``ended`` is a training pass that has left a batch or gradients for the next step."""
        return ended in self.ended and ended.trains

    def zeroed(self) -> None:
        """Note that the script has cleared gradients: those of passes before the last one train nothing, such as a sum of squares."""
        if self.ended:
            self.ended = [each for each in self.ended[:-1] if not each.backwards] + self.ended[-1:]

    @contextmanager
    def computing(self, built_at: int) -> Iterator[None]:
        """Inside the block, the closure of a step runs: each backward counts as this step, before which its pass may end."""
        before, self.computing_for = self.computing_for, built_at
        try:
            yield
        finally:
            self.computing_for = before

    def count(self, built_at: int) -> bool:
        """Count a step of an optimizer that was built when all passes had drawn ``built_at`` batches.

        Returns whether it trains on one of several passes that another thread reads: the clock decides when that pass begins and ends.
        """
        if len(self._open) != 1 or self.ended:
            return self._count_of_several(built_at)
        each = self._open[0]
        if _trains_on(each, built_at):
            each.steps, each.waits_for_step, each.left_out = each.steps + 1, False, False
        return False

    def _count_of_several(self, built_at: int) -> bool:
        since = min((each.drawn_at for each in self._open), default=0)
        ended = [each for each in self.ended if each.trains and (not self._open or (each.drawn_at > since and not each.exhausted))]
        passes = dict.fromkeys([*self._open, *ended, *([] if self._open else self.ended[-1:])])
        drew = [each for each in passes if _trains_on(each, built_at)]
        candidates = [each for each in drew if not each.left_out] or drew
        last = max((each.drawn_at for each in candidates if each in self._open), default=0)
        for each in drew:
            each.waits_for_step = False
            alone = each in self._open and not (each.drawn_at == last or each.together or each.in_thread or each.trained)
            if alone or each not in candidates:
                each.left_out = True
            else:
                each.steps += 1
        return any(each.in_thread for each in drew)


def _may_share(each: Pass, modes: int) -> bool:
    """Whether a pass that begins now, after ``modes`` changes of modes, may be read for the same step, as where loaders are zipped.

    Not with a validation whose iterator the script still holds: all its batches are read, or the model has left eval mode since.
    """
    validated = (each.is_read and each.length > 1) or (each.after_eval and each.modes != modes)
    return each.waits_for_step and not each.left_out and not validated


def _trains_on(each: Pass, built_at: int) -> bool:
    """Whether a step of an optimizer trains on a batch of the pass, if it trains on the pass at all."""
    return (each.waits_for_step and each.drawn_at > built_at) or (each.in_thread and each.drawn > 0)
