"""Says once that a script which accumulates by hand sends its gradients after each batch, and what sends them once a step.

A script accumulates by hand if each of the first steps of an optimizer follows several backwards at one line, on different batches of the
same training pass, and nothing changes the gradients in between: only then does ``no_sync`` leave the same gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

from parwrap.loop.one_pass import Pass
from parwrap.loop.passes import Passes
from parwrap.places import Place
from parwrap.strategies.ddp_averager import GradientAverager
from parwrap.torch_private.tensors import version_of

__all__ = ["MicroBatches"]

STEPS = 3
"""After so many steps of an optimizer it is clear whether a script accumulates."""


class MicroBatches:
    """Looks at the averaged backwards before the first steps.

    Args:
        passes: the passes over loaders.
        say: prints a line.
    """

    def __init__(self, passes: Passes, say: Callable[[str], None]) -> None:
        self._passes, self._say = passes, say
        self._steps: WeakKeyDictionary[Optimizer, list[int]] = WeakKeyDictionary()  # on how many batches of a line each step was taken
        self._batches: dict[tuple[Place, int, Pass], set[int]] = {}  # since the last step, or since gradients have changed
        self._left: tuple[int, int] | None = None  # a gradient that the last backward has left, and its version

    def before(self, averager: GradientAverager) -> None:
        """Note that a backward is about to add to the gradients of ``averager``, unless the script has changed or cleared them."""
        if self._left is None or _gradient(averager) != self._left:
            self._batches.clear()

    def after(self, averager: GradientAverager, place: Place) -> None:
        """Note that the backward at ``place`` has left averages."""
        self._left = _gradient(averager)
        passes, training = self._passes, self._passes.training
        # in doubt which of several loaders the batch comes from, it is none; nor do the batches of a closure count
        if training is not None and training.drawn_at == passes.draws and passes.steps.computing_for is None:
            self._batches.setdefault((place, averager.number, training), set()).add(training.drawn)

    def stepped(self, optimizer: Optimizer) -> bool:
        """Note a step of ``optimizer``. Returns whether all is known."""
        steps = self._steps.setdefault(optimizer, [])
        (place, *_), batches = max(self._batches.items(), key=lambda item: len(item[1]), default=((None,), ()))
        steps.append(len(batches))
        self._batches, self._left = {}, None
        if len(steps) < STEPS:
            return False
        if min(steps) > 1:
            self._say(
                f"{place} runs {steps[-1]} backwards for each step, on a batch each, and every one sends its gradients. That is right but "
                "slow. Run all but the last inside `with parwrap.no_sync():`. Or step after each batch, as without accumulation, "
                f"and let parwrap accumulate: --accumulate {steps[-1]}, @parwrap.accumulate({steps[-1]})"
            )
        return True


def _gradient(averager: GradientAverager) -> tuple[int, int] | None:
    """Which gradient the first parameter with one has, and how often it was changed."""
    grad = next((p.grad for p in averager.parameters if p.grad is not None), None)
    return None if grad is None else (id(grad), version_of(grad))
