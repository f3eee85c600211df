"""What a strategy is: an interceptor that decides how ranks train together.

Callers tell a strategy to act, and never ask which strategy it is. Each strategy has its own file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer

from parwrap.checks.same_step import SameStep
from parwrap.errors import UsageError
from parwrap.intercept.interceptor import Interceptor
from parwrap.loop.divisors import Divisors
from parwrap.loop.losses import Losses
from parwrap.loop.modules import Modules
from parwrap.loop.optimizers import Optimizers
from parwrap.loop.passes import Passes
from parwrap.options import Options
from parwrap.places import script_place
from parwrap.ranks.group import Group

__all__ = ["Loop", "Strategy", "refuse_one_vector"]


@dataclass(frozen=True)
class Loop:
    """What strategies use of the running loop: its process group, its state and its checks.

    Attributes:
        group: the process group.
        options: a function that returns the options of the innermost running function.
        passes: the open passes.
        optimizers: the optimizers of the script.
        modules: the modules of the script.
        losses: the scalars that backwards are called on.
        divisors: weighs the cross entropies of a global batch.
        same_step: checks that all ranks are at the same step.
    """

    group: Group
    options: Callable[[], Options]
    passes: Passes
    optimizers: Optimizers
    modules: Modules
    losses: Losses
    divisors: Divisors
    same_step: SameStep


def refuse_one_vector(optimizer: Optimizer, strategy: str) -> None:
    """Refuse an optimizer that keeps one state for all parameters together, which cannot be sharded.

    Raises:
        UsageError: ``optimizer`` is an LBFGS.
    """
    if isinstance(optimizer, LBFGS):
        raise UsageError(
            f"{script_place()} uses an LBFGS, which steps all parameters as one vector, so its state cannot be sharded: choose a strategy "
            f"other than {strategy!r}, or another optimizer."
        )


class Strategy(Interceptor):
    """How the ranks of a loop train together.

    Args:
        loop: the state of the running loop.

    Attributes:
        loop: the same.
        together: whether ranks end together, because they train one model.
    """

    together = True

    def __init__(self, loop: Loop) -> None:
        self.loop = loop

    def no_sync(self) -> AbstractContextManager[None]:
        """A context manager: inside the block, each rank adds up its gradients; the first backward after the block averages the sums."""
        return nullcontext()

    def begins_pass(self, trains: bool) -> None:
        """Called when a pass over a loader begins; ``trains`` says whether it is a training pass."""

    def average(self, parameters: Sequence[torch.Tensor]) -> None:
        """Average the gradients of ``parameters`` over the ranks now, outside of a backward."""

    def end(self) -> None:
        """Compare with the other ranks a last time; called when the function has ended on this rank without an error."""

    def make_whole(self) -> None:
        """Gather what this rank holds in shards; called before the function returns, because its caller may use the trained model."""

    def close(self) -> None:
        """Release the script's parameters."""

    def data_parallel(self, module: nn.Module, build: Callable[[Any], None]) -> None:
        """Build the script's ``nn.DataParallel`` with the device of this rank alone."""
        device = self.loop.group.device
        build([device.index or 0] if device.type == "cuda" else None)
