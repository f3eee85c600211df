"""The base class of all strategies: an interceptor that is created when a distributed function starts, and its interface to parwrap.

It has what most strategies share. What a strategy does in the intercepted calls is in its own file.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from parwrap.coordination.participant import Participant
from parwrap.errors import UsageError
from parwrap.group.collectives import all_reduced
from parwrap.group.group import Group
from parwrap.intercept.interceptor import Interceptor
from parwrap.loop.loop_state import Loop
from parwrap.options import Options
from parwrap.strategies.common.share import Share

__all__ = ["Strategy"]


class Strategy(Interceptor, Participant):
    """A way to train in parallel.

    Args:
        group: the ranks.
        loop: what the training loop has done so far.
        options: the options of the innermost running function.

    Attributes:
        together: the ranks that train one model with this one and divide data, files and evaluations; ``None`` if each trains its own.
        share: a function, called for this rank's share of a backward of others, while it runs none itself.
    """

    OPTIONS: tuple[str, ...] = ()
    """The options of ``distributed`` that only some strategies have."""

    steps_together = True
    """Whether all ranks make each step together, each on its share of a batch; otherwise every rank steps at its own pace."""

    hands_over = False
    """Whether it needs the function's result."""

    share: Callable[[], Share]

    def __init__(self, group: Group, loop: Loop, options: Callable[[], Options]) -> None:
        self.together: Group | None = group
        self.share = Share
        self._group, self._loop, self._options = group, loop, options

    @classmethod
    def check(cls, options: Options) -> None:
        """Raise :class:`UsageError` for ``options`` that have no meaning with this strategy."""

    @classmethod
    def joining(cls, group: Group | None, options: Options) -> AbstractContextManager[Group | None]:
        """The group of the ranks that run the loop, out of all; ``None`` for a single rank, and for one that does not run the loop."""
        return nullcontext(group)

    @property
    def averages_gradients(self) -> bool:
        """Whether backward passes now leave averages over the ranks.

        Otherwise they leave this rank's own gradients, also if ranks step together but average weights, or a server averages.
        """
        return self.steps_together

    @classmethod
    def outside_loop(cls, group: Group, options: Options, loop: Loop) -> Any:
        """The role of a rank of ``group`` that does not run the loop: see ``server.py``."""
        raise NotImplementedError

    def check_feature(self, name: str) -> None:
        """Raise :class:`UsageError` if the decorator of that name has no meaning with this strategy."""
        if name == "sync_bn" and not self.steps_together:
            raise UsageError(
                f"parwrap.sync_bn needs a shared batch: with strategy={self._options().strategy!r} every rank trains on separate "
                "batches. Remove it, or choose another strategy."
            )

    def interceptors(self) -> list[Interceptor]:
        """The interceptors that it adds, in the order in which they are installed."""
        return [self]

    def described(self) -> str:
        """What it does, for the line at the start of training."""
        return self._options().strategy

    def returned(self, result: Any) -> None:
        """Called when the function has returned ``result``, but only if :attr:`hands_over`."""

    def failed(self, error: BaseException) -> None:
        """Called when this rank leaves with ``error``."""

    def apart(self) -> AbstractContextManager[None]:
        """Let ranks call models independently inside the block, as in a divided evaluation."""
        return nullcontext()

    def averaged(self) -> AbstractContextManager[None]:
        """Treat all gradients as averages over the ranks inside the block, wherever they come from."""
        return nullcontext()

    def summed(self, sums: list[torch.Tensor], weight: float) -> tuple[list[torch.Tensor], float]:
        """The sums over the ranks of local gradients from backward passes, and of the ranks' ``weight``."""
        *totals, weights = all_reduced([*sums, torch.tensor(weight, dtype=torch.float64)], self._group)
        return totals, weights.item()

    def leave(self, returns: bool) -> None:
        """Called when all ranks have reached the end together. If it ``returns``, leave the user's objects as a single process would."""

    def close(self) -> None:
        """Release the user's objects, even after an error."""
