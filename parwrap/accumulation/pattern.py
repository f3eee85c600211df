"""The pattern of a loop that accumulates by hand: the backwards between two optimizer steps, learned from earlier ones.

Nothing is run or sent here.
"""

from __future__ import annotations

from collections.abc import Hashable

__all__ = ["Pattern"]

LONGEST = 4096
MOST = 64
"""The limits of backwards in a window, and of windows, beyond which a loop is no longer learned, to bound memory."""


class Pattern:
    """Windows of backwards, by the place of the first.

    A window that has come twice in a row is *learned*; it is expected once it was :meth:`taken`.

    Attributes:
        running: the places of the backwards that have run since the last step.

    >>> pattern = Pattern()
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
        """A backward is about to run at ``place``: returns whether another is expected there before the next step."""
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
        """Whether backwards of several places are expected in the running window."""
        return len(set(self._expected or ())) > 1

    def expects(self, place: Hashable) -> int:
        """The number of backwards expected at ``place`` in the running window."""
        return self._expected.count(place) if self._expected else 0

    def step(self) -> None:
        """An optimizer is about to step."""
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
        """From the next step on expect the learned windows."""
        self._taken = dict(self._learned)

    def drop(self) -> None:
        """From the next step on expect nothing."""
        self._taken = {}
