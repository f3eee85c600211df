"""Every rank trains its own model on all of the data; nothing is averaged or compared."""

from __future__ import annotations

from parwrap.intercept.intercepted_calls import Backward
from parwrap.strategies.strategy import Strategy

__all__ = ["Independent"]


class Independent(Strategy):
    """Averages nothing."""

    def backward(self, call: Backward) -> None:
        call.run()
        self.loop.passes.ran_backward()
