"""What numbers cover that the script computes from a pass: this rank's share of the samples, or all of them (contract, rule 7)."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from parwrap.data.samplers import Count
from parwrap.errors import UsageError, counted
from parwrap.loop.one_pass import Pass
from parwrap.loop.passes import Passes
from parwrap.places import Place, warn

__all__ = ["Totals"]

READ_MORE = "docs/numbers.rst"

SAME = 1e-5
"""The relative difference up to which a value is the sum of the losses: a script may add them up in float32."""


@dataclass
class _PassesOver:
    """The passes over one loader.

    Attributes:
        last: the last one.
        earlier: passes before it that have trained, and that no total covers.
    """

    last: Pass | None = None
    earlier: list[Pass] = field(default_factory=list)


class Totals:
    """The passes that numbers may come from, and the line that parwrap prints once about numbers of a share.

    Args:
        size: the number of ranks.
        passes: the open passes.
        say: prints a line on rank 0.

    Attributes:
        evaluating: whether a function runs that ``@evaluate`` divides.
    """

    def __init__(self, size: int, passes: Passes, say: Callable[[str], None]) -> None:
        self._size, self._passes, self._say = size, passes, say
        self.evaluating = False
        self._loaders: weakref.WeakKeyDictionary[Any, _PassesOver] = weakref.WeakKeyDictionary()
        self._since: list[Pass] = []  # the first pass in shares and the first whole one since the last total
        self._totalled = False  # whether there was a total since the last pass began
        self._newest: Pass | None = None
        self._untold: Pass | None = None  # a pass over a share; ``next(iter(loader))`` ends it before its batch is used
        self._told = False
        self._warned: set[Any] = set()

    def begins(self, loader: Any, opened: Pass) -> None:
        """Note that the pass ``opened`` over ``loader`` begins."""
        self._follows(loader, opened)
        if not opened.in_thread:
            self._newest = opened
            if opened.trains:
                self.tell()

    def evaluates(self, loader: Any, place: Place) -> None:
        """Note that a pass over ``loader`` begins at ``place`` in ``@evaluate``: what is returned is merged, so it is of all samples."""
        self._follows(loader, Pass(trains=False, shared=False, place=place))

    def _follows(self, loader: Any, opened: Pass) -> None:
        """Note that ``opened`` is the last pass over ``loader`` now. Keep the one before, if it has trained since its last total."""
        if self._totalled and not opened.in_thread:
            self._since, self._totalled = [], False
        if all(each.shared != opened.shared or each.in_thread != opened.in_thread for each in self._since):
            self._since.append(opened)
        over = self._loaders.setdefault(loader, _PassesOver())
        before, over.last = over.last, opened
        if before is None or before.in_thread:  # what depends on when a thread runs is not compared
            return
        if before.totalled is not None:
            over.earlier = []
        if before.trained and before.drawn > (before.totalled or 0) and all(each.shared != before.shared for each in over.earlier):
            over.earlier.append(before)

    def other_kind(self, loader: Any, last: Pass) -> Pass | None:
        """A pass over ``loader`` that trained after the last total, in shares if ``last`` was whole, or whole if that was in shares."""
        return next((each for each in self._loaders[loader].earlier if each.shared != last.shared), None)

    def ended(self, ended: Pass) -> None:
        """Note that the pass ``ended`` has ended."""
        count = self.count(ended)
        ended.counting = lambda batches, exhausted: count  # the samplers may hold the dataset
        if self._size > 1 and ended.shared and ended.drawn and not (self._untold and self._untold.was_used):
            self._untold = ended

    def count(self, opened: Pass) -> Count | None:
        """What this rank has read in the pass ``opened``; ``None`` if that is not known."""
        return None if opened.counting is None else opened.counting(opened.drawn, opened.exhausted)

    def tell(self) -> None:
        """Print once that the numbers of a training pass are of a share, unless the script has added them up by now."""
        if self._untold is None or not self._untold.was_used or self._told:
            return
        self._told = True
        opened, count = self._untold, self.count(self._untold)
        if count is None:
            read = "a share of its samples"
        else:
            read = f"{count.samples}" + (f" of {opened.whole}" if opened.whole is not None else "") + " samples"
        self._say(
            f"{opened.place} read {read} on each of {self._size} ranks. What is computed from them, such as correct answers, is of this "
            f"share: parwrap.total(correct, of=loader) is that of all ranks ({READ_MORE})"
        )

    def added_up(self) -> None:
        """Note that the script adds up or gathers numbers of all ranks: it knows."""
        self._told = True

    def of(self, loader: Any) -> Pass:
        """The last pass over ``loader``.

        Raises:
            UsageError: ranks have not read ``loader``, or it is none.
        """
        try:
            last = self._loaders[loader].last
        except (KeyError, TypeError):  # a TypeError if it cannot be referenced weakly
            last = None
        if last is None:
            raise UsageError(
                f"parwrap.total(of=...) takes a loader whose samples the values are computed from, but the ranks have read none from this "
                f"{type(loader).__name__}. Pass the DataLoader itself, and not a bar or an iterator over it, after a pass over it."
            )
        other = self.other_kind(loader, last)
        if other is not None and last.trained and (last.place, other.place) not in self._warned:
            self._warned.add((last.place, other.place))
            warn(
                f"parwrap: parwrap.total() totals the last pass over the loader, which ranks have read {_how(last)}. An earlier one, which "
                f"they have read {_how(other)}, has trained since the last total: values that cover both are wrong. Write "
                "parwrap.total(values, of=loader) after each pass, or give ranks shares in every pass, by parwrap.shard(loader) where the "
                "loader is made."
            )
        last.totalled = last.drawn
        self._after_total()
        return last

    def decided(self) -> Pass:
        """The pass that values of :func:`parwrap.total` come from if the script does not say.

        Raises:
            UsageError: there was none, one is open, or passes since the last total were of several kinds.
        """
        innermost, since = self._passes.innermost, self._since
        if not since:
            raise UsageError(
                "parwrap.total() adds up what ranks have computed from a loader, but no loader has been read here. parwrap.reduce_sum adds "
                "up numbers of other kinds."
            )
        if innermost is not None:
            unclear = f"the pass at {innermost.place} is still open"
        elif len(since) > 1 or since[0].in_thread:
            unclear = " and ".join(f"{each.place} read {'a share' if each.shared else 'everything'}" for each in since)
        else:
            for over in self._loaders.values():
                if over.last is not None:
                    over.last.totalled = over.last.drawn
            self._after_total()
            return since[0]
        raise UsageError(
            f"parwrap.total() cannot tell which loader the values are computed from: {unclear}. Write parwrap.total(values, of=loader)."
        )

    def _after_total(self) -> None:
        self._totalled = True
        self.added_up()

    def repeated(self, opened: Pass, samples: int) -> None:
        """Warn once for a line that ranks repeat so many ``samples`` in the pass ``opened``."""
        if samples and opened.place not in self._warned:
            self._warned.add(opened.place)
            over = f" over {counted(opened.whole, 'sample')}" if opened.whole is not None else ""
            warn(
                f"parwrap: ranks repeat {counted(samples, 'sample')} in the pass at {opened.place}{over}, so that all have as many "
                f"batches, and parwrap.total counts them again. Divide by a number that is counted alike. {self._remedy(opened)}"
            )

    def warn_of_losses(self, opened: Pass, values: Mapping[str, Any]) -> None:
        """Warn, once for a line, of a value that is the sum of the losses of the pass ``opened``: these are means over ranks already.

        Not if the number of batches is another value, as in an average meter: divided by its total, the sum is the mean.

        Args:
            opened: the pass that the values are computed from.
            values: the values, each with the expression that reaches it.
        """
        losses, numbers = opened.losses, {name: _number(value) for name, value in values.items()}
        if not math.isfinite(losses) or not losses or opened.drawn in (opened.samples, *numbers.values()):
            return
        for name, number in numbers.items():
            if math.isclose(number, losses, rel_tol=SAME) and (opened.place, "losses") not in self._warned:
                self._warned.add((opened.place, "losses"))
                warn(
                    f"parwrap: parwrap.total() adds up values{name}, the sum of the losses after their backward() in the pass at "
                    f"{opened.place}. These are means over all ranks already: the total divided by len(loader) is {self._size} times too "
                    "large. Leave it out, or total loss.item() * len(x) and divide by the number of samples."
                )
                return

    def _remedy(self, opened: Pass) -> str:
        if opened.weights is not None:
            return "A batch_size whose last batch has a sample for each rank avoids it."
        return 'uneven="join" (--uneven join) or batch="global" (--batch global) read each sample once.'

    def summed(self, equal: Callable[[], bool]) -> None:
        """Note that the script has added up or gathered numbers of the ranks; ``equal`` returns whether they were equal on all.

        Warn once if they are equal after a whole pass: their sum is too large.
        """
        self.added_up()
        newest, innermost = self._newest, self._passes.innermost
        if newest is None or newest.shared or not newest.drawn or self.evaluating or (innermost is not None and innermost.shared):
            return
        if newest.place in self._warned or not equal():
            return
        self._warned.add(newest.place)
        warn(
            f"parwrap: reduce_sum adds up numbers that are equal on all ranks, after every rank has read everything at {newest.place}: the "
            f"sum is {self._size} times that of one process. parwrap.total(values, of=loader) adds up only what comes from shares."
        )


def _how(opened: Pass) -> str:
    return f"{'in shares' if opened.shared else 'whole'} at {opened.place}"


def _number(value: Any) -> float:
    """A number or a tensor of one as a float; NaN for anything else."""
    if isinstance(value, torch.Tensor):
        value = value.item() if value.numel() == 1 else None
    return float(value) if isinstance(value, (int, float)) else math.nan
