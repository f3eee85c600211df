"""Detects gradients that a pass reads without a step, anew for each batch: they are means over the ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from parwrap.coordination.call_site import location
from parwrap.data.pass_history import OpenPass
from parwrap.loop.loop_state import Loop

__all__ = ["DroppedGradients"]


class DroppedGradients:
    """Warns once, and says how each rank gets gradients of single batches.

    Args:
        loop: what the training loop has done so far.
        say: a function, called with the warning.
    """

    def __init__(self, loop: Loop, say: Callable[[str], None]) -> None:
        self._loop, self._say = loop, say
        self._said = False

    def note(self, training: OpenPass) -> None:
        """Remember which tensor the first backward of the pass has left."""
        if (gradient := self._loop.a_gradient()) is not None:
            training.gradient = weakref.ref(gradient)

    def check(self, training: OpenPass) -> None:
        """The pass, which had a backward, has ended."""
        if not self._said and self._drops(training):
            self._said = True
            self._say(
                f"at {location()} the loop over a DataLoader called backward() but no optimizer step. The gradients are means over the "
                "ranks, and each rank read only its own share. For gradients of single samples or batches, such as for a Fisher matrix "
                "or gradient norms, use torch.autograd.grad(loss, parameters), so that each rank reads all data and has its own "
                "gradients, or compute them in a function decorated with @parwrap.rank_zero_only. This is shown once."
            )

    def _drops(self, training: OpenPass) -> bool:
        """Whether gradients were made anew without a step in between. Accumulated ones stay."""
        changed = training.gradient is not None and training.gradient() is not self._loop.a_gradient()
        shared_out = training.batches is not None
        return changed and shared_out and (self._loop.steps, self._loop.versions()) == (training.steps, training.versions)
