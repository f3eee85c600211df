"""The interceptor for a loop that accumulates by hand: gradients are averaged once per step, not in every backward pass.

:class:`_Pattern` learns which backward passes precede a step. Until all ranks have learned the same, every backward is averaged; when the
loop deviates, the remaining gradients are averaged before they are used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from parwrap.accumulation.at_work import AtWork
from parwrap.accumulation.over_ranks import OverRanks
from parwrap.coordination.call_site import call_site
from parwrap.data.passes import Pass
from parwrap.group.group import is_alone
from parwrap.intercept.backward import Backward
from parwrap.intercept.clipping import Clip
from parwrap.intercept.interceptor import intercepts
from parwrap.intercept.scaler import ScalerCall
from parwrap.loop.autograd_graph import reached
from parwrap.strategies.common.share import Share

__all__ = ["ByHand"]

FIRST_LOOK = 8
"""The number of sync points before the ranks compare what they have learned, and the least number before they compare again."""
RARER = 4
"""They compare again after a fourth of all earlier sync points, once that is more."""

LONGEST = 4096
MOST = 64
"""The limits of backward passes in a window, and of windows, beyond which a loop is no longer learned, to bound memory."""


@dataclass
class _Reading:
    """A pass over a loader, and the number of its remaining batches, if known."""

    left: int | None


@dataclass
class _Local:
    """The local gradients that backward passes at one place computed on this rank: the weight of each, and their tensors if needed."""

    weights: list[float] = field(default_factory=list)
    reached: dict[int, torch.Tensor] = field(default_factory=dict)


class ByHand(AtWork):
    """Averages gradients once per step.

    Args:
        over_ranks: a function that returns the object that averages over the ranks; ``None`` for a single rank.
    """

    def __init__(self, over_ranks: Callable[[], OverRanks | None]) -> None:
        self._over_ranks = over_ranks
        self._pattern = _Pattern()
        self._readings: list[_Reading] = []
        self._local: defaultdict[Hashable, _Local] = defaultdict(_Local)
        self._first_sync_point = self._next_look = 0

    def count(self, total: float) -> None:
        """Do nothing, because the loop weights its batches itself."""

    @intercepts
    def iterate(self, loader: DataLoader, original: Callable[[DataLoader], Iterator]) -> Iterator:
        """Iterate over ``loader``, and detect its last batch, after which many loops step even if the window is not full."""
        batches = original(loader)
        if is_alone() or get_worker_info() is not None or not torch.is_grad_enabled():
            return batches
        reading = _Reading(_length(loader))

        def drew(batch: Any) -> None:
            if reading.left is not None:
                reading.left -= 1

        def closed(exhausted: bool) -> None:
            self._readings = [each for each in self._readings if each is not reading]

        self._readings.append(reading)
        return Pass(batches, closed, drew)

    iterate_pipelines = iterate

    @intercepts
    def backward(self, call: Backward) -> None:
        """Run ``call``, and average its gradients unless the same place is expected to call backward again before the next step."""
        over_ranks = None if self._busy or is_alone() else self._over_ranks()
        if over_ranks is None:
            call.run()
            return
        place = call_site()
        goes_on = self._pattern.goes_on(place) and all(reading.left != 0 for reading in self._readings)
        with self._at_work():
            if not goes_on:
                self._look_at_others(over_ranks, call)
            if not (goes_on or place in self._local):
                call.run()
                return
            batch = over_ranks.batch(call)
            local, weight = self._local[place], batch.weight
            scale = weight * batch.loss_factor
            local.weights.append(weight)
            call = call.scaled(scale) if scale != 1.0 else call
            if goes_on:
                if self._pattern.mixed:
                    local.reached.update((id(leaf), leaf) for leaf in reached(call.roots))
                call._replace(averaged=False).run()
                return
            del self._local[place]
            existing_grads = local.reached.values() if local.reached else over_ranks.with_gradients()
            call._replace(weight=fmean(local.weights), existing_grads=tuple(existing_grads)).run()

    @intercepts
    def clip(self, clip: Clip) -> Any:
        """Clip averaged gradients."""
        self._average()
        return clip.run()

    @intercepts
    def use_scaler(self, call: ScalerCall) -> Any:
        """Average gradients before the script's own scaler checks them, because all ranks must see non-finite values."""
        if call.name != "update":
            self._average()
        return call.run()

    @intercepts
    def skips(self, optimizer: torch.optim.Optimizer) -> bool:
        """Average the remaining gradients before a step."""
        if not (self._busy or is_alone()):
            self._average()
            self._pattern.step()
        return False

    def finish(self) -> None:
        """Average unused gradients after the function has returned, for the steps of ranks that continue."""
        self._average(gives=True)

    def end(self) -> None:
        """Forget everything that was learned at the end of the function."""

    def _look_at_others(self, over_ranks: OverRanks, call: Backward) -> None:
        """Check whether all ranks have learned the same windows. All ranks check at the same sync points."""
        if not self._first_sync_point:
            self._first_sync_point = over_ranks.next_sync_point
            self._next_look = self._first_sync_point + FIRST_LOOK
        if over_ranks.next_sync_point < self._next_look:
            return
        # gradients of tensors without an optimizer are the loop's own, which may use them after any backward
        learned = self._pattern.learned() if over_ranks.owns(reached(call.roots)) else ()
        everybodys = over_ranks.compared(learned)
        if everybodys is not None:
            (self._pattern.take if learned and len(everybodys) == 1 else self._pattern.drop)()
        self._next_look = over_ranks.next_sync_point + max(FIRST_LOOK, (over_ranks.next_sync_point - self._first_sync_point) // RARER)

    def _average(self, gives: bool = False) -> None:
        """Average the local gradients of backward passes.

        Args:
            gives: whether they may be added to backward passes of ranks that do not reach this sync point.
        """
        if self._busy or is_alone() or not self._local:
            return
        over_ranks = self._over_ranks()
        if over_ranks is None:
            return
        weights, several = [weight for local in self._local.values() for weight in local.weights], [over_ranks.taken()]
        whole = max(len(weights), sum(self._pattern.expects(place) for place in self._local))
        self._local.clear()
        with self._at_work():
            over_ranks.applied(several, fmean(weights), over_ranks.given(several, sum(weights) / whole) if gives else Share).add()


class _Pattern:
    """Learns which backward passes a loop runs between two steps: windows, identified by the place of their first backward pass.

    A window that has occurred twice in a row is *learned*. It is expected once all ranks have :meth:`taken` it over.

    Attributes:
        running: the places of the backward passes that have run since the last step.

    >>> pattern = _Pattern()
    >>> for _ in range(2):
    ...     _ = [pattern.goes_on("loss") for _ in range(3)]; pattern.step()
    >>> pattern.learned()
    ((0, 0, 0),)
    >>> pattern.take()
    >>> [pattern.goes_on("loss") for _ in range(3)]
    [True, True, False]
    """

    def __init__(self) -> None:
        self.running: list[Hashable] = []
        self._last: dict[Hashable, list[Hashable]] = {}
        self._learned: dict[Hashable, list[Hashable]] = {}
        self._taken: dict[Hashable, list[Hashable]] = {}
        self._expected: list[Hashable] | None = None

    def goes_on(self, place: Hashable) -> bool:
        """Record a backward pass at ``place``. Returns whether another one is expected there before the next step."""
        if not self.running:
            self._expected = self._taken.get(place)
        at = len(self.running)
        if at < LONGEST:
            self.running.append(place)
        if not self._expected:
            return False
        at %= len(self._expected)  # a step may be skipped, as with non-finite gradients
        if self._expected[at] != place:
            self._expected = None
            return False
        return place in self._expected[at + 1 :]

    @property
    def mixed(self) -> bool:
        """Whether backward passes at several places are expected in the running window."""
        return len(set(self._expected or ())) > 1

    def expects(self, place: Hashable) -> int:
        """The number of backward passes expected at ``place`` in the running window."""
        return self._expected.count(place) if self._expected else 0

    def step(self) -> None:
        """End the running window at a step, and learn it if the previous window that began at the same place was equal."""
        window, self.running = self.running, []
        if not window or len(window) == LONGEST or (len(self._last) == MOST and window[0] not in self._last):
            return
        if self._last.get(window[0]) == window:
            self._learned[window[0]] = window
        self._last[window[0]] = window

    def learned(self) -> tuple[tuple[int, ...], ...]:
        """The learned windows, with places numbered in order: the same on ranks that run the same loop."""
        numbers: dict[Hashable, int] = {}
        return tuple(tuple(numbers.setdefault(place, len(numbers)) for place in window) for window in self._learned.values())

    def take(self) -> None:
        """Expect the learned windows from the next step on."""
        self._taken = dict(self._learned)

    def drop(self) -> None:
        """Expect no windows from the next step on."""
        self._taken = {}


def _length(loader: DataLoader) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None
