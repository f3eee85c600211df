"""The strategy of a single rank: nothing to average, but the loop's facts are kept, since streams and loaders go by them."""

from __future__ import annotations

from parwrap.loop import Loop
from parwrap.verbs.backward import Backward

__all__ = ["Single"]


class Single:
    """Runs every backward as it is."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def backward(self, call: Backward) -> None:
        call.run()
        self._loop.ran_backward()
