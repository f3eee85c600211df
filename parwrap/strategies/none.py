"""No strategy: every rank trains a separate model on all of the data, as in a sweep over seeds or learning rates."""

from __future__ import annotations

from collections.abc import Callable

from parwrap.errors import UsageError
from parwrap.group.group import Group
from parwrap.intercept.backward import Backward
from parwrap.intercept.interceptor import intercepts
from parwrap.loop.loop_state import Loop
from parwrap.options import Options
from parwrap.strategies.common.strategy import Strategy

__all__ = ["NoStrategy"]


class NoStrategy(Strategy):
    """Averages nothing and splits nothing; every rank has separate files."""

    steps_together = False

    def __init__(self, group: Group, loop: Loop, options: Callable[[], Options]) -> None:
        super().__init__(group, loop, options)
        self.together = None

    @classmethod
    def check(cls, options: Options) -> None:
        for name in ("batch", "uneven", "lr", "loss"):
            if (value := getattr(options, name)) != getattr(Options, name):
                raise UsageError(
                    f"{name}={value!r} says how ranks share a batch, but with strategy='none' each rank has all data: remove one of them."
                )

    @intercepts
    def backward(self, call: Backward) -> None:
        """Run ``call`` unchanged."""
        call.run()
        self._loop.ran_backward()

    def described(self) -> str:
        return "strategy none: gradients are not averaged, every rank trains a separate model"
