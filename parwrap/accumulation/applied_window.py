"""Applies an open window without a backward: sets the mean gradients, clips them as the loop does, and steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from parwrap.accumulation.sums import Asked, merged
from parwrap.intercept.clipping import Clip
from parwrap.loop.loop_state import parameters_of

__all__ = ["Applied", "clips_of", "mean_of"]


@dataclass
class Applied:
    """The content of an open window.

    Attributes:
        gradients: parameters and their mean gradients.
        clips: the calls that clip these gradients before the steps.
        optimizers: the optimizers to step, in order.
        held: a function that returns a context manager to enter around the steps.
    """

    gradients: Sequence[tuple[torch.Tensor, torch.Tensor]]
    clips: Sequence[Clip]
    optimizers: Sequence[torch.optim.Optimizer]
    held: Callable[[], AbstractContextManager[None]] = nullcontext

    def run(self, scaler: torch.amp.GradScaler | None = None) -> None:
        """Step with these gradients only, and restore ``.grad`` afterwards.

        Args:
            scaler: the script's own scaler, which scales them.
        """
        before = [(p, p.grad) for optimizer in self.optimizers for p in parameters_of(optimizer)]
        before += [(p, p.grad) for p, _ in self.gradients]
        for p, _ in before:
            p.grad = None
        try:
            for p, gradient in self.gradients:
                p.grad = gradient
            set_here = {id(p) for p, _ in self.gradients}
            scaled = [optimizer for optimizer in self.optimizers if scaler and any(p.grad is not None for p in parameters_of(optimizer))]
            with self.held():
                for optimizer in scaled:
                    scaler.unscale_(optimizer)  # type: ignore[union-attr]
                for clip in self.clips:
                    clip.replayed([p for p in clip.parameters if id(p) in set_here])
                for optimizer in self.optimizers:
                    scaler.step(optimizer) if optimizer in scaled else optimizer.step()  # type: ignore[union-attr]
                if scaled:
                    scaler.update()  # type: ignore[union-attr]
        finally:
            for p, grad in before:
                p.grad = grad

    def add(self) -> None:
        """Add the gradients to the existing ones."""
        for p, gradient in self.gradients:
            p.grad = gradient if p.grad is None else p.grad + gradient


def mean_of(several: Iterable[Asked], weight: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The sums of ``several``, divided by the filled part of the window."""
    return [(p, total / weight) for p, total in merged(several).values()]


def clips_of(several: Iterable[Asked]) -> list[Clip]:
    """The clipping calls before these steps, each once."""
    return list({id(clip): clip for asked in several for clip in asked.clips}.values())
