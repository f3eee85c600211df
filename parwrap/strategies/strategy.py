"""What a strategy is: an interceptor that decides how ranks train together.

A strategy is asked to act, never asked what it is. Each has its own file.
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
    """What the running loop has done so far, and what checks it, for strategies.

    Attributes:
        group: the process group.
        options: a function that returns the options of the innermost running function.
        passes: the open passes.
        optimizers: the optimizers of the script.
        modules: the modules of the script.
        losses: the scalars that backwards are called on.
        divisors: the cross entropies of a global batch.
        same_step: the check of lockstep.
        say: prints a line on rank 0.
    """

    group: Group
    options: Callable[[], Options]
    passes: Passes
    optimizers: Optimizers
    modules: Modules
    losses: Losses
    divisors: Divisors
    same_step: SameStep
    say: Callable[[str], None]


def refuse_one_vector(optimizer: Optimizer, strategy: str) -> None:
    """Refuse an optimizer that has no state of a single parameter.

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
        loop: what the loop has done so far.

    Attributes:
        together: whether ranks end together, because they train one model.
    """

    together = True

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    @property
    def loop(self) -> Loop:
        """What the loop has done so far."""
        return self._loop

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside the block, gradients add up on this rank; the first backward after it averages the sums."""
        return nullcontext()

    def begins_pass(self, trains: bool) -> None:
        """A pass over a loader begins."""

    def average(self, parameters: Sequence[torch.Tensor]) -> None:
        """Average the gradients of ``parameters`` over the ranks now, outside of a backward."""

    def end(self) -> None:
        """The function has ended on this rank without an error: compare with the others a last time."""

    def make_whole(self) -> None:
        """The function returns to its caller, who may use what it has trained: give this rank the whole of what it held in shards."""

    def close(self) -> None:
        """Release the script's parameters."""

    def data_parallel(self, module: nn.Module, build: Callable[[Any], None]) -> None:
        """The script wants several devices in this process: it gets the device of this rank."""
        device = self._loop.group.device
        build([device.index or 0] if device.type == "cuda" else None)
