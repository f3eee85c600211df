"""Which passes train, and how a pass begins at its first ``next`` and ends once, whatever it reads (contract, rule 2).

``loaders.py`` and ``dali.py`` decide what each rank reads of DataLoaders and of DALI's pipelines.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from parwrap.data.samplers import samples_in
from parwrap.data.streams import Part
from parwrap.intercept.intercepted_calls import Batches
from parwrap.loop import random_streams
from parwrap.loop.optimizers import Optimizers
from parwrap.loop.passes import Pass, Passes, script_drops
from parwrap.options import Options
from parwrap.places import Place
from parwrap.ranks.group import Group, say

__all__ = ["PassIterator", "Sources", "trains"]


def trains(*, gradients_on: bool, optimizer_built: bool, in_eval: bool) -> bool:
    """Whether a pass that begins now is a training pass (rule 2).

    Args:
        gradients_on: whether gradients are on.
        optimizer_built: whether the script has built an optimizer.
        in_eval: whether the models of the optimizers at work are in eval mode.

    >>> trains(gradients_on=True, optimizer_built=True, in_eval=False), trains(gradients_on=True, optimizer_built=True, in_eval=True)
    (True, False)
    """
    return gradients_on and optimizer_built and not in_eval


class Sources:
    """The base of what passes read: DataLoaders and DALI's pipelines. Subclasses implement :meth:`begin`.

    Args:
        group: the ranks.
        options: a function that returns the options of the innermost running function.
        passes: the open passes.
        optimizers: the optimizers of the script.
        begins: called when a pass begins, with whether it trains.
    """

    def __init__(
        self,
        group: Group,
        options: Callable[[], Options],
        passes: Passes,
        optimizers: Optimizers,
        begins: Callable[[bool], None],
    ) -> None:
        self._group, self._rank, self._size = group, group.world.rank, group.world.size
        self._options, self._passes, self._optimizers, self._begins = options, passes, optimizers, begins
        self._open: weakref.WeakSet[PassIterator] = weakref.WeakSet()
        self._undo = ExitStack()
        self._script_drops = self._undo.enter_context(script_drops())
        self._said: set[Place] = set()

    def begin(self, iteration: Any) -> None:
        """Decide what ``iteration`` reads, and begin its pass. Called at its first ``next``."""
        raise NotImplementedError

    def go_on(self, iteration: Any) -> None:
        """Open the pass of ``iteration``: it begins, or the script reads on after another pass has ended it."""
        self._passes.begin(iteration.opened)
        self._open.add(iteration)

    def end(self, iteration: Any, exhausted: bool) -> None:
        """End the pass of ``iteration``; ``exhausted`` says whether it was read to its end.

        After a line's first pass over a share that trained, print how many samples this rank has read.
        """
        opened: Pass = iteration.opened
        opened.exhausted = exhausted
        if self._passes.is_open(opened):
            self._leave(opened)
        if self._passes.in_loop():
            self._passes.draw()
        if self._size > 1 and opened.shared and opened.drawn and self._trained_in(opened) and opened.place not in self._said:
            self._said.add(opened.place)
            of = f" of {opened.whole}" if opened.whole is not None else ""
            say(
                f"{opened.place} read {opened.samples}{of} samples on each of {self._size} ranks. Sums over samples, such as correct "
                "answers or loss * len(x), are of one rank's samples: parwrap.reduce_sum adds them up over all ranks."
                + (" After its backward(), a loss is the mean over all ranks already." if self._options().averages_losses else "")
            )

    def close(self) -> None:
        """Let passes that outlive the scope read on, without switching random streams."""
        for iteration in list(self._open):
            iteration.detach()
        self._undo.close()

    def drops(self) -> bool:
        """Whether the script has dropped the iterator that is being finalized. If so, its pass ends now.

        If the garbage collector has found it, the next pass over the same loader or pipelines ends it.
        """
        return self._script_drops()

    def _may_train(self) -> bool:
        """Whether :func:`trains` holds for a pass that begins now, whatever it reads."""
        return trains(
            gradients_on=torch.is_grad_enabled(), optimizer_built=self._optimizers.were_built, in_eval=self._optimizers.evaluate()
        )

    def _trained_in(self, opened: Pass) -> bool:
        return self._optimizers.trained > opened.trained_before

    def _leave(self, opened: Pass) -> None:
        self._passes.end(opened)
        if opened.trains:
            self._optimizers.ended_pass()


class PassIterator(Batches):
    """The iterator of one pass. It begins at its first ``next``, and ends once: when it is exhausted or dropped.

    Attributes:
        place: the line that reads it.
        opened: the pass, once it has begun.
        batches: the iterator that it takes batches from, once it has begun.
        reading: the libraries that draw from this rank's own streams while it reads a batch.
    """

    samples_in = staticmethod(samples_in)

    def __init__(self, sources: Sources, place: Place) -> None:
        super().__init__(None)
        self.place = place
        self.opened: Pass | None = None
        self.reading: frozenset[str] = random_streams.NONE
        self._sources: Sources | None = sources
        self._passes = sources._passes

    def __next__(self) -> Any:
        sources = self._sources
        if sources is None:
            if self.batches is None or (self.opened is not None and self.opened.exhausted):
                raise StopIteration
            batch = next(self.batches)
            return batch.batch if type(batch) is Part else batch
        begins = self.batches is None
        if begins:
            sources.begin(self)
        elif not self._passes.is_open(self.opened):  # type: ignore[arg-type]
            sources.go_on(self)
        asked = time.perf_counter()
        if self._passes.in_loop():
            before = self._passes.streams.use(self.reading)
            batch = self._read()
            if begins or before is not self.reading:
                self._passes.draw()
        else:
            batch = self._read()
        opened = self.opened
        if opened is not None and opened.trains:
            self._passes.clock.data += time.perf_counter() - asked
            if type(batch) is Part:
                opened.weights.append(batch.weight)  # type: ignore[union-attr]
                batch = batch.batch
            self._passes.drew(opened, self.samples_in(batch))
        return batch

    def _read(self) -> Any:
        try:
            return next(self.batches)  # type: ignore[arg-type]
        except StopIteration:
            self.finish(exhausted=True)
            raise
        except BaseException:  # the script may go on with the next batch
            if self.opened is not None and self.opened.weights:
                self.opened.weights.popleft()
            raise

    def finish(self, exhausted: bool) -> None:
        """End the pass, which was read to its end if ``exhausted``, and dropped otherwise."""
        sources = self.detach()
        if sources is not None and self.opened is not None:
            if not exhausted:
                self.batches = iter(())  # workers of torch's iterator end with it
            sources.end(self, exhausted)

    def detach(self) -> Sources | None:
        """Let the script read on without a scope. Returns the sources; ``None`` if this was called before."""
        sources, self._sources = self._sources, None
        return sources

    def __del__(self) -> None:
        sources = getattr(self, "_sources", None)
        if sources is not None and sources.drops():
            self.finish(exhausted=False)
