"""The state of mixed precision: the loss scale and the number of steps skipped for it.

Torch's own ``GradScaler`` decides when the scale grows and shrinks; it learns for each iteration whether a gradient was non-finite. It is
on the CPU for every device, so that reading the scale never waits.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch

from parwrap.errors import ParwrapError

__all__ = ["FLOOR", "AmpState", "Policy"]

FLOOR = 2.0**-24
"""The smallest positive number of float16: a loss of 1 with a smaller scale is 0."""


class Policy(torch.amp.GradScaler):
    """Parwrap's own GradScaler; a subclass, to distinguish it from the user's."""


class AmpState:
    """The loss scale, for logging and for checkpoints.

    Args:
        scales: whether losses are scaled; if not, the scale is 1, and loading has no effect.
        policy: options of :class:`torch.amp.GradScaler`: ``init_scale``, ``growth_factor``, ``backoff_factor``, ``growth_interval``.

    Attributes:
        scales: as given.
        skipped_steps: the number of optimizer steps skipped because of a non-finite gradient.
        restored: whether it was loaded from a checkpoint.

    >>> state = AmpState(init_scale=8.0)
    >>> state.end_iteration(found=True)
    >>> state
    AmpState(scale=4.0, skipped_steps=0)
    """

    def __init__(self, scales: bool = True, **policy: Any) -> None:
        self.scales, self._policy = scales, policy
        self.reset()

    def reset(self) -> None:
        """Start over, for another training."""
        self._scaler = Policy("cpu", enabled=self.scales, **self._policy)
        torch.amp.GradScaler.scale(self._scaler, _number(1.0))  # which makes the scale
        self.skipped_steps, self.restored = 0, False
        self._skipped_in_a_row = 0

    @property
    def scale(self) -> float:
        """The factor of losses."""
        return self._scaler.get_scale()

    def end_iteration(self, found: bool) -> None:
        """Update the scale after an iteration in which a non-finite gradient was ``found``, or none.

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
                "(parwrap.amp(dtype='bf16'), --amp bf16), lower the learning rate, or look for what makes the loss infinite or NaN."
            )

    def state_dict(self) -> dict[str, Any]:
        """The argument of :meth:`load_state_dict`, for a checkpoint."""
        return {**self._scaler.state_dict(), "skipped_steps": self.skipped_steps} if self.scales else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``, which may also be that of a :class:`torch.amp.GradScaler`; no effect without scaling."""
        if self.scales and state:
            self._scaler.load_state_dict(state)
            self.skipped_steps, self.restored = state.get("skipped_steps", 0), True

    def __repr__(self) -> str:
        return f"AmpState(scale={self.scale}, skipped_steps={self.skipped_steps})"


def _number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32, device="cpu")  # whatever the script's defaults are
