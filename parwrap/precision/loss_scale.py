"""The state of mixed precision: the loss scale and the number of steps skipped for it.

Torch's own ``GradScaler`` decides when the scale grows and shrinks. After each iteration it learns whether a gradient was non-finite. It is
on the CPU for every device, so that reading the scale never waits.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.optim import Optimizer

from parwrap.errors import ParwrapError

__all__ = ["FLOOR", "AmpState", "Iterations", "Policy"]

FLOOR = 2.0**-24
"""The smallest positive number of float16: with a smaller scale, a loss of 1 becomes 0."""


class Policy(torch.amp.GradScaler):
    """Parwrap's own GradScaler; a subclass, to distinguish it from the user's."""


class AmpState:
    """The loss scale, for logging and for checkpoints.

    Args:
        scales: whether losses are scaled; if not, the scale is 1, and loading has no effect.
        policy: options of :class:`torch.amp.GradScaler`: ``init_scale``, ``growth_factor``, ``backoff_factor``, ``growth_interval``.

    Attributes:
        scales: whether losses are scaled.
        skipped_steps: the number of optimizer steps skipped because of a non-finite gradient.
        restored: whether the state was loaded from a checkpoint.

    >>> state = AmpState(init_scale=8.0)
    >>> state.end_iteration(found=True)
    >>> state
    AmpState(scale=4.0, skipped_steps=0)
    """

    def __init__(self, scales: bool = True, **policy: Any) -> None:
        self.scales, self._policy = scales, policy
        self.reset()

    def reset(self) -> None:
        """Reset the scale for another training."""
        self._scaler = Policy("cpu", enabled=self.scales, **self._policy)
        torch.amp.GradScaler.scale(self._scaler, _number(1.0))  # this creates the scale
        self.skipped_steps, self.restored = 0, False
        self._skipped_in_a_row = 0

    @property
    def scale(self) -> float:
        """The factor for losses."""
        return self._scaler.get_scale()

    def end_iteration(self, found: bool) -> None:
        """Update the scale after an iteration; ``found`` says whether a gradient was non-finite.

        Raises:
            ParwrapError: the scale is so small that no further step will be taken.
        """
        result = _number(0.0)
        result.grad = _number(math.inf if found else 0.0)
        self._scaler.unscale_(SimpleNamespace(param_groups=[{"params": [result]}]))  # type: ignore[arg-type]  # it reads nothing else
        self._scaler.update()
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if found else 0
        if found and self.scale < FLOOR:
            raise ParwrapError(
                f"gradients were not finite in {self._skipped_in_a_row} iterations in a row, and the loss scale has fallen to "
                f"{self.scale:.2g}: the training has diverged, or its gradients do not fit into float16. Compute in bf16 "
                "(parwrap.amp(dtype='bf16'), --amp bf16), lower the learning rate, or find out what makes the loss infinite or NaN."
            )

    def state_dict(self) -> dict[str, Any]:
        """The argument of :meth:`load_state_dict`, for a checkpoint."""
        return {**self._scaler.state_dict(), "skipped_steps": self.skipped_steps} if self.scales else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``, which may also be the state of a :class:`torch.amp.GradScaler`. This has no effect without scaling."""
        if self.scales and state:
            self._scaler.load_state_dict(state)
            self.skipped_steps, self.restored = state.get("skipped_steps", 0), True

    def __repr__(self) -> str:
        return f"AmpState(scale={self.scale}, skipped_steps={self.skipped_steps})"


class Iterations:
    """Calls ``over(found)`` at the end of each iteration of the user's loop, which it infers from optimizer steps.

    A hand-written loop calls ``GradScaler.update`` once an iteration. Here no call marks the end, so an iteration ends when every optimizer
    has stepped. Some optimizers step less often than others: a generator steps less often than its critic. As soon as one optimizer steps
    twice, the iteration ends; from then on, it ends when the optimizers that stepped in it have all stepped again.

    Args:
        over: a function, called with whether one of the iteration's steps was skipped.
    """

    def __init__(self, over: Callable[[bool], None]) -> None:
        self._over = over
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._taking_part: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._stepped: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()

    def expect(self, optimizer: Optimizer) -> None:
        """Record that ``optimizer`` exists, and may step in each iteration."""
        if optimizer not in self._known:
            self._known.add(optimizer)
            self._taking_part.add(optimizer)

    def forget(self) -> None:
        """Forget all optimizers, because another training begins."""
        self._known.clear()
        self._taking_part.clear()
        self._stepped.clear()

    def stepped(self, optimizer: Optimizer, found: bool) -> None:
        """Record a step of ``optimizer``, which was skipped if a non-finite gradient was ``found``."""
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


def _number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32, device="cpu")  # whatever the script's defaults are
