"""The strategy of a single rank: it averages nothing, but tracks the loop's state, which streams and loaders need."""

from __future__ import annotations

from parwrap.intercept.backward import Backward
from parwrap.intercept.interceptor import Interceptor, intercepts
from parwrap.loop.loop_state import Loop

__all__ = ["Single"]


class Single(Interceptor):
    """Runs every backward as it is."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    @intercepts
    def backward(self, call: Backward) -> None:
        call.run()
        self._loop.ran_backward()
