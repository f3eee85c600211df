"""The loss scale of fp16: when it grows and shrinks, how many steps were skipped, and when an iteration of a loop is over.

The rule is that of torch's ``GradScaler`` (Micikevicius et al., 2018, section 3.2): halve the scale after an iteration with a gradient that
is not finite, and double it after 2,000 iterations without one. The scale is a number on the host, so reading it never waits for a GPU.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from parwrap.errors import ParwrapError
from parwrap.loop.optimizers import parameters_of

__all__ = ["AmpState", "Iterations"]

FLOOR = 2.0**-24
"""The smallest positive number of float16: with a smaller scale, a loss of 1 becomes 0."""


class AmpState:
    """The loss scale, for logging and for checkpoints.

    Args:
        scales: whether losses are scaled; if not, the scale is 1, and loading has no effect.
        init_scale: the first scale.
        growth_factor: multiplies the scale after ``growth_interval`` iterations in a row without a skipped step.
        backoff_factor: multiplies the scale after an iteration with a skipped step.
        growth_interval: how many iterations without a skipped step it takes until the scale grows.

    Attributes:
        scales: whether losses are scaled.
        scale: the number that losses are multiplied by.
        skipped_steps: the number of optimizer steps skipped because of a gradient that was not finite.
        restored: whether the running call of the user's function has loaded the state from a checkpoint.

    >>> state = AmpState(init_scale=8.0)
    >>> state.end_iteration(found=True)
    >>> state
    AmpState(scale=4.0, skipped_steps=0)
    """

    def __init__(
        self,
        scales: bool = True,
        *,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        self.scales, self._init_scale = scales, init_scale
        self._growth_factor, self._backoff_factor, self._growth_interval = growth_factor, backoff_factor, growth_interval
        self.reset()

    def reset(self) -> None:
        """Reset the scale and all counts, because another training begins."""
        self.scale = float(self._init_scale) if self.scales else 1.0
        self.skipped_steps, self.restored = 0, False
        self._growth_tracker = self._skipped_in_a_row = 0

    def end_iteration(self, found: bool) -> None:
        """Update the scale after an iteration; ``found`` says whether a gradient was not finite.

        Raises:
            ParwrapError: the scale has fallen below the smallest positive number of float16.
        """
        if not found:
            self._skipped_in_a_row = 0
            self._growth_tracker = (self._growth_tracker + 1) % self._growth_interval
            if self._growth_tracker == 0 and math.isfinite(larger := _rounded(self.scale * self._growth_factor)):
                self.scale = larger
            return
        self.scale, self._growth_tracker = _rounded(self.scale * self._backoff_factor), 0
        self._skipped_in_a_row += 1
        if self.scale < FLOOR:
            raise ParwrapError(
                f"gradients were not finite in {self._skipped_in_a_row} iterations in a row, and the loss scale has fallen to "
                f"{self.scale:.2g}: the training has diverged, or its gradients do not fit into float16. Compute in bf16 "
                "(parwrap.amp(dtype='bf16'), --amp bf16), lower the learning rate, or find out what makes the loss infinite or NaN."
            )

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint and :meth:`load_state_dict`, with the keys of a ``GradScaler``; empty without scaling."""
        if not self.scales:
            return {}
        return {
            "scale": self.scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._growth_tracker,
            "skipped_steps": self.skipped_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``, which may also be that of a :class:`torch.amp.GradScaler`. This has no effect without scaling."""
        if self.scales and state:
            self.scale, self._growth_tracker = float(state["scale"]), state["_growth_tracker"]
            self._growth_factor, self._backoff_factor = state["growth_factor"], state["backoff_factor"]
            self._growth_interval, self.skipped_steps = state["growth_interval"], state.get("skipped_steps", 0)
            self.restored = True

    def __repr__(self) -> str:
        return f"AmpState(scale={self.scale}, skipped_steps={self.skipped_steps})"


def _rounded(scale: float) -> float:
    """``scale`` rounded to float32, in which torch's ``GradScaler`` keeps it."""
    return torch.tensor(scale, dtype=torch.float32, device="cpu").item()


class Iterations:
    """Calls ``over(found)`` at the end of each iteration of the user's loop, which it infers from optimizer steps.

    A hand-written loop calls ``GradScaler.update`` in each iteration. Here no call marks the end, so an iteration ends when every optimizer
    has stepped. Some optimizers step less often than others: a generator steps less often than its critic. When one optimizer steps
    a second time, the iteration has ended before that step. From then on an iteration ends when all optimizers that stepped in that
    one have stepped. An optimizer is left out once all of its parameters belong to optimizers built later, although the script may still
    hold it.

    Args:
        over: called at the end of an iteration, with true if a gradient of one of its steps was not finite.
    """

    def __init__(self, over: Callable[[bool], None]) -> None:
        self._over = over
        self._known: weakref.WeakKeyDictionary[Optimizer, None] = weakref.WeakKeyDictionary()  # in the order in which they were built
        self._taking_part: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._stepped: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()

    def expect(self, optimizer: Optimizer) -> None:
        """Record that ``optimizer`` exists, and may step in each iteration."""
        if optimizer not in self._known:
            self._known[optimizer] = None
            self._taking_part.add(optimizer)
            owners = {id(p): each for each in list(self._known) for p in parameters_of(each)}
            self._taking_part &= set(owners.values())

    def forget(self) -> None:
        """Forget all optimizers, because another training begins."""
        self._known.clear()
        self._taking_part.clear()
        self._stepped.clear()

    def stepped(self, optimizer: Optimizer, found: bool) -> None:
        """Record a step of ``optimizer``; ``found`` says whether a gradient was not finite, so that the step was skipped."""
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
