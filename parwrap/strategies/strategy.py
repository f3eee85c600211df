"""What a way to train in parallel is to the rest of parwrap: an actor, made when a distributed function starts.

The base of all strategies, with what most have in common; what one does with the verbs that it has methods for is its own file's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from parwrap.collectives import all_reduced
from parwrap.group import Group
from parwrap.loop import Loop
from parwrap.options import Options
from parwrap.strategies.share import Share

__all__ = ["Strategy"]


class Strategy:
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
        """The group of the ranks that run the loop, out of all; ``None`` for a single rank."""
        return nullcontext(group)

    def actors(self) -> list[Any]:
        """Those that take part in verbs, in the order in which they are installed."""
        return [self]

    def described(self) -> str:
        """What it does, for the line at the start of training."""
        return self._options().strategy

    def refuse(self, feature: str) -> None:
        """Raise :class:`UsageError` for another ``feature``, written as it is called, that has no meaning with this strategy."""

    def apart(self) -> AbstractContextManager[None]:
        """While this is held, ranks call models as often as each likes, as where an evaluation is shared out."""
        return nullcontext()

    def summed(self, sums: list[torch.Tensor], weight: float) -> tuple[list[torch.Tensor], float]:
        """The sums over the ranks of what backwards have left that were not to be averaged, and of the ranks' ``weight``."""
        *totals, weights = all_reduced([*sums, torch.tensor(weight, dtype=torch.float64)], self._group)
        return totals, weights.item()

    def leave(self) -> None:
        """All ranks have come to the end together."""

    def close(self) -> None:
        """Let go of what is the user's; also after an error."""
