"""The actor for a loop that accumulates by hand: gradients are averaged once for each of its steps, not in each of its backwards.

Which backwards a step follows is learned in ``pattern.py``. Until all ranks have learned the same, and wherever the loop does something
else, every backward is averaged, or what was not yet is averaged before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from parwrap.accumulation.over_ranks import OverRanks
from parwrap.accumulation.pattern import Pattern
from parwrap.accumulation.sums import Asked, with_sums
from parwrap.data.passes import Pass
from parwrap.group import is_alone
from parwrap.sites import call_site
from parwrap.strategies.graph import reached
from parwrap.strategies.share import Share
from parwrap.verbs.backward import Backward
from parwrap.verbs.clipping import Clip

__all__ = ["ByHand"]

FIRST_LOOK = 8
"""Meetings of the ranks after which they first compare what they have learned; then after twice as many, and so on."""


@dataclass
class _Reading:
    """A pass over a loader, and how many of its batches are still to come, if that is known."""

    left: int | None


class ByHand:
    """Averages once for each step.

    Args:
        over_ranks: gives what averages over the ranks; ``None`` for a single one, for which nothing is to be done.
    """

    def __init__(self, over_ranks: Callable[[], OverRanks | None]) -> None:
        self._over_ranks = over_ranks
        self._pattern = Pattern()
        self._readings: list[_Reading] = []
        self._weights: list[float] = []
        self._next_look, self._pause = 0, FIRST_LOOK
        self._busy = False

    def count(self, total: float) -> None:
        """The loop weighs its batches itself."""

    def iterate(self, loader: DataLoader, original: Callable[[DataLoader], Iterator]) -> Iterator:
        """A pass over ``loader``: many loops take a step after its last batch, however many there were before."""
        batches = original(loader)
        if is_alone() or get_worker_info() is not None or not torch.is_grad_enabled():
            return batches
        reading = _Reading(_length(loader))

        def drew() -> None:
            if reading.left is not None:
                reading.left -= 1

        def closed(exhausted: bool) -> None:
            self._readings = [each for each in self._readings if each is not reading]

        self._readings.append(reading)
        return Pass(batches, closed, drew)

    def backward(self, call: Backward) -> None:
        """Run ``call``, and have its gradients averaged if no other is expected in their place before the next step."""
        over_ranks = None if self._busy or is_alone() else self._over_ranks()
        if over_ranks is None:
            call.run()
            return
        goes_on = self._pattern.goes_on(call_site()) and all(reading.left != 0 for reading in self._readings)
        with self._at_work():
            if not goes_on:
                self._look_at_others(over_ranks, call)
            if not (goes_on or self._weights):
                call.run()
                return
            weight = over_ranks.weight
            self._weights.append(weight)
            call = call.scaled(weight) if weight != 1.0 else call
            if goes_on:
                call._replace(averaged=False).run()
            else:
                mean, several = self._take(over_ranks)
                with_sums(call, several, 1.0)._replace(weight=mean).run()

    def clip(self, clip: Clip) -> Any:
        """Clip what is averaged."""
        self._average()
        return clip.run()

    def unscale_by_hand(self) -> None:
        """A script's own scaler looks for gradients that are not finite, which all ranks must see."""
        self._average()

    def skips(self, optimizer: torch.optim.Optimizer) -> bool:
        """No step is left out; each uses what is averaged."""
        if not (self._busy or is_alone()):
            self._average()
            self._pattern.step()
        return False

    def finish(self) -> None:
        """The function has returned: what no step has used belongs to the steps of ranks that go on."""
        self._average(gives=True)

    def end(self) -> None:
        """Nothing of it outlives the function."""

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """What is called inside is none of the user's calls."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def _look_at_others(self, over_ranks: OverRanks, call: Backward) -> None:
        """At meetings that are the same on all ranks, find out whether they have learned the same."""
        number = over_ranks.meetings
        self._next_look = self._next_look or number + self._pause
        if number < self._next_look:
            return
        self._pause *= 2
        # what no optimizer steps with is the loop's own, which may use it after any backward
        learned = self._pattern.learned() if over_ranks.owns(reached(call.beginnings)) else ()
        everybodys = over_ranks.compared(learned)
        if everybodys is not None:
            (self._pattern.take if learned and len(everybodys) == 1 else self._pattern.drop)()
        self._next_look = over_ranks.meetings + self._pause

    def _average(self, gives: bool = False) -> None:
        """Average what backwards have left on each rank alone.

        Args:
            gives: whether it may go into backwards of ranks that do not come for this.
        """
        if self._busy or is_alone() or not self._weights:
            return
        over_ranks = self._over_ranks()
        if over_ranks is None:
            return
        weight, several = self._take(over_ranks)
        with self._at_work():
            over_ranks.applied(several, weight, over_ranks.given(several, weight) if gives else Share).add()

    def _take(self, over_ranks: OverRanks) -> tuple[float, list[Asked]]:
        """How much this rank's backwards since the last average count, and their gradients, which are taken out of ``.grad``."""
        mean = sum(self._weights) / len(self._weights)
        self._weights = []
        several = [Asked(optimizer) for optimizer in over_ranks.optimizers()]
        for asked in several:
            asked.sums.take(p for p in asked.parameters if p.requires_grad)
        return mean, several


def _length(loader: DataLoader) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None
