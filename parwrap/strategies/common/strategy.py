"""What a way to train in parallel is to the rest of parwrap: an interceptor, made when a distributed function starts.

The base of all strategies, with what most have in common. What a strategy does in the calls that it intercepts is in its own file.
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
        options: those of the innermost function that runs.

    Attributes:
        together: the ranks that train one model with this one, by whom data, files and evaluations are shared out; ``None`` if each trains
            its own.
        share: called for what this rank gives to a backward of others, while it does not call one itself.
    """

    OPTIONS: tuple[str, ...] = ()
    """Those options of ``distributed`` that only some strategies have."""

    steps_together = True
    """Whether each step is one of all ranks, on a batch that each has its share of; else every rank steps at its own pace, by itself."""

    hands_over = False
    """Whether it needs what the function has returned."""

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
        """The group of the ranks that run the loop, out of all; ``None`` for a single rank, and for one that does not run it."""
        return nullcontext(group)

    @property
    def averages_gradients(self) -> bool:
        """Whether backwards leave averages over the ranks now.

        Else they leave this rank's own gradients, also where ranks step together and it is weights that are averaged, or a server averages.
        """
        return self.steps_together

    @classmethod
    def beside(cls, group: Group, options: Options, loop: Loop) -> Any:
        """What a rank of ``group`` is that does not run the loop: see ``server.py``."""
        raise NotImplementedError

    def check_feature(self, name: str) -> None:
        """Raise :class:`UsageError` if the decorator of that name has no meaning with this strategy."""
        if name == "sync_bn" and not self.steps_together:
            raise UsageError(
                f"parwrap.sync_bn has no shared batch: with strategy={self._options().strategy!r} every rank trains on its own batches. "
                "Leave it out, or choose another strategy."
            )

    def interceptors(self) -> list[Interceptor]:
        """What intercepts calls for it, in the order in which they are installed."""
        return [self]

    def described(self) -> str:
        """What it does, for the line at the start of training."""
        return self._options().strategy

    def returned(self, result: Any) -> None:
        """The function has returned that, if :attr:`hands_over`."""

    def failed(self, error: BaseException) -> None:
        """This rank leaves with ``error``."""

    def apart(self) -> AbstractContextManager[None]:
        """While this is held, ranks call models as often as each likes, as where an evaluation is shared out."""
        return nullcontext()

    def averaged(self) -> AbstractContextManager[None]:
        """While this is held, gradients are averages over the ranks already, whoever has made them."""
        return nullcontext()

    def summed(self, sums: list[torch.Tensor], weight: float) -> tuple[list[torch.Tensor], float]:
        """The sums over the ranks of what backwards have left that were not to be averaged, and of the ranks' ``weight``."""
        *totals, weights = all_reduced([*sums, torch.tensor(weight, dtype=torch.float64)], self._group)
        return totals, weights.item()

    def leave(self, returns: bool) -> None:
        """All ranks have come to the end together; if it ``returns``, the user's objects must be as a single process would leave them."""

    def close(self) -> None:
        """Let go of what is the user's; also after an error."""
