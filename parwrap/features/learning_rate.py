"""The actor that has optimizers step at a larger learning rate, because ranks together take a larger batch.

What the user and the schedules see in ``param_groups`` is never touched beyond the step itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.optim import Optimizer

from parwrap.verbs import acting

__all__ = ["learning_rates_times"]


@contextmanager
def learning_rates_times(factor: Callable[[], float]) -> Iterator[None]:
    """While this is held, optimizers step at their learning rate times ``factor()``."""
    rates = _LearningRates(factor)
    try:
        with acting([rates]):
            yield
    finally:
        rates.put_back()


class _LearningRates:
    def __init__(self, factor: Callable[[], float]) -> None:
        self._factor = factor
        self._before: list[tuple[dict, object]] = []

    def step(self, optimizer: Optimizer) -> None:
        """``optimizer`` is about to step."""
        self.put_back()
        factor = self._factor()
        for group in (group for group in optimizer.param_groups if "lr" in group):
            self._before.append((group, group["lr"]))
            group["lr"] = group["lr"] * factor

    def stepped(self, optimizer: Optimizer) -> None:
        """It has stepped."""
        self.put_back()

    def put_back(self) -> None:
        """Undo what is left of the last step, which may have raised."""
        for group, lr in self._before:
            group["lr"] = lr
        self._before.clear()
