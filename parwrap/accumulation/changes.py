"""Detects gradients that a loop changes itself between a backward and its step, in the first steps, and warns.

Inside a window such a change applies to the gradient of a part of it, and in the last batch once more to all.
"""

from __future__ import annotations

import weakref

import torch

from parwrap.coordination.call_site import location, warn
from parwrap.loop.loop_state import parameters_of
from parwrap.torch_private.tensors import version_of

__all__ = ["ChangesByHand"]

LOOKS = 8
"""The number of skipped steps to check before a loop is trusted."""


class ChangesByHand:
    """Compares gradients at a step with those of the last backward; warns once."""

    def __init__(self) -> None:
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._left: dict[int, tuple[torch.Tensor, int]] = {}
        self._looks = LOOKS

    def remember(self) -> None:
        """A backward has run."""
        if self._looks:
            parameters = [p for optimizer in self._optimizers for p in parameters_of(optimizer)]
            self._left = {id(p): (p.grad, version_of(p.grad)) for p in parameters if p.grad is not None}

    def look(self, optimizer: torch.optim.Optimizer) -> None:
        """A step of ``optimizer`` is about to be skipped."""
        if not self._looks:
            return
        self._looks -= 1
        self._optimizers.add(optimizer)
        left, self._left = self._left, {}
        for p in parameters_of(optimizer):
            grad, version = left.get(id(p), (None, 0))
            if grad is not None and p.grad is not None and (p.grad is not grad or version_of(p.grad) != version):
                self._looks = 0
                warn(
                    f"parwrap: gradients were changed between backward() and the step at {location()}. Inside a window of "
                    "parwrap.accumulate this changes the part of each batch, and in the last batch once more all of it: a mask is "
                    "right, a weight decay is applied several times. torch.nn.utils.clip_grad_norm_ and similar functions act only on "
                    "gradients that a step uses. This is shown once."
                )
                return
