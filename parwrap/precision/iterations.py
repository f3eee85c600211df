"""When an iteration of the user's loop ends, derived from the steps of its optimizers.

A hand-written loop calls ``GradScaler.update`` once an iteration. Nobody calls anything here, so an iteration ends when every optimizer has
stepped. Optimizers that do not step in every iteration (a critic steps more often than a generator) show when another one steps a second
time: from then on those that had stepped before make an iteration.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch.optim import Optimizer

__all__ = ["Iterations"]


class Iterations:
    """Calls ``over(found)`` once an iteration.

    Args:
        over: called with whether one of the iteration's steps was skipped.
    """

    def __init__(self, over: Callable[[bool], None]) -> None:
        self._over = over
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._taking_part: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._stepped: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()

    def expect(self, optimizer: Optimizer) -> None:
        """``optimizer`` exists; a new one may step in each iteration."""
        if optimizer not in self._known:
            self._known.add(optimizer)
            self._taking_part.add(optimizer)

    def forget(self) -> None:
        """Another training begins, with other optimizers."""
        self._known.clear()
        self._taking_part.clear()
        self._stepped.clear()

    def stepped(self, optimizer: Optimizer, found: bool) -> None:
        """``optimizer`` steps, or would without the non-finite gradient that was ``found``."""
        if optimizer in self._stepped:
            self._taking_part = weakref.WeakSet(self._stepped)
            self._end()
        self._stepped[optimizer] = found
        if set(self._taking_part) <= set(self._stepped):
            self._end()

    def _end(self) -> None:
        found = any(self._stepped.values())
        self._stepped.clear()
        self._over(found)
