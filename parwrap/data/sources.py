"""How a pass begins at its first ``next`` and ends once, whatever it reads. Which passes train: ``loops.py``.

``loaders.py`` and ``dali.py`` decide what each rank reads of DataLoaders and of DALI's pipelines.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from parwrap.data.loops import Loops
from parwrap.data.samplers import lacks_samples, samples_in
from parwrap.data.streams import Part
from parwrap.data.totals import Totals
from parwrap.intercept.intercepted_calls import Batches
from parwrap.loop import random_streams
from parwrap.loop.one_pass import Batch, Pass
from parwrap.loop.optimizers import Optimizers
from parwrap.loop.passes import Passes, script_drops
from parwrap.options import Options
from parwrap.places import call_stack, place_of
from parwrap.ranks.group import Group, say

__all__ = ["PassIterator", "Sources"]


class Sources:
    """The base of what passes read: DataLoaders and DALI's pipelines. Subclasses implement :meth:`begin`.

    Args:
        group: the ranks.
        options: a function that returns the options of the innermost running function.
        passes: the open passes.
        optimizers: the optimizers of the script.
        loops: what parwrap remembers of the script's loops.
        begins: called when a pass begins, with whether it trains.
        totals: what the numbers that the script computes from passes cover.
    """

    def __init__(
        self,
        group: Group,
        options: Callable[[], Options],
        passes: Passes,
        optimizers: Optimizers,
        loops: Loops,
        begins: Callable[[bool], None],
        totals: Totals,
    ) -> None:
        self._group, self._rank, self._size = group, group.world.rank, group.world.size
        self._options, self._passes, self._optimizers, self._loops, self._begins = options, passes, optimizers, loops, begins
        self._totals = totals
        self._open: weakref.WeakSet[PassIterator] = weakref.WeakSet()
        self._undo = ExitStack()
        self._script_drops = self._undo.enter_context(script_drops())

    def begin(self, iteration: Any) -> None:
        """Decide what ``iteration`` reads, and begin its pass. Called at its first ``next``."""
        raise NotImplementedError

    def go_on(self, iteration: Any) -> None:
        """Open the pass of ``iteration``: it begins, or the script reads on after another pass has ended it."""
        self._passes.begin(iteration.opened)
        self._open.add(iteration)

    def end(self, iteration: Any, exhausted: bool) -> None:
        """End the pass of ``iteration``; ``exhausted`` says whether it was read to its end."""
        opened: Pass = iteration.opened
        opened.exhausted = exhausted
        if self._passes.is_open(opened):
            self._passes.end(opened)
        self._loops.end(opened)
        if self._passes.in_loop():
            self._passes.draw()
        self._totals.ended(opened)

    def say_endless(self, opened: Pass) -> None:
        """Print that the sampler of ``opened`` has no end, so that ranks take no fewer steps than one process."""
        say(
            f"{opened.place} reads a sampler that repeats without an end, so its pass never ends: in as many steps, {self._size} ranks "
            f"read {self._size} times as many samples as one process. To read as many, take 1/{self._size} of the steps, or divide each "
            'batch: --batch global (batch="global")'
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


class PassIterator(Batches):
    """The iterator of one pass. It begins at its first ``next``, and ends once: when it is exhausted or dropped.

    Attributes:
        place: the line that reads it.
        stack: the calls that lead to that line.
        opened: the pass, once it has begun.
        batches: the iterator that it takes batches from, once it has begun.
        reading: the libraries that draw from this rank's own streams while it reads a batch.
        endless_from: if its sampler has no length: so many samples on one rank show that it has no end. 0 otherwise.
    """

    samples_in = staticmethod(samples_in)

    def __init__(self, sources: Sources) -> None:
        super().__init__(None)
        frame = sys._getframe(1)
        lines = call_stack(frame)
        self.place, self.stack = place_of(lines, frame), sources._loops.stack(lines)
        self.opened: Pass | None = None
        self.reading: frozenset[str] = random_streams.NONE
        self.endless_from = 0
        self._sources: Sources | None = sources
        self._passes = sources._passes
        self._lock = threading.RLock()

    def __next__(self) -> Any:
        with self._lock:  # several threads may read one iterator: the pass begins once, and counts each batch
            sources, passes = self._sources, self._passes
            if sources is None:
                return self._next_after_scope()
            begins = self.batches is None
            if begins:
                sources.begin(self)
            elif not passes.is_open(self.opened):  # type: ignore[arg-type]
                sources.go_on(self)
            asked = time.perf_counter()
            if passes.in_loop():
                before = passes.streams.use(self.reading)
                batch = self._read()
                if begins or before is not self.reading:
                    passes.draw()
            else:
                batch = self._read()
            opened: Pass = self.opened  # type: ignore[assignment]
            if not opened.trains:
                passes.drew(opened, 0)
                return batch
            passes.clock.data += time.perf_counter() - asked
            if opened.weights is None:
                passes.drew(opened, self.samples_in(batch))
            else:
                batch = self._weighted(opened, batch)
            if self.endless_from and opened.samples > self.endless_from:
                self.endless_from = 0
                sources.say_endless(opened)
            return batch

    def _weighted(self, opened: Pass, batch: Any) -> Any:
        """Note that a batch was drawn that has a weight, and return what the script gets of it."""
        if type(batch) is Part:
            opened.weights.append(Batch(batch.samples, batch.weight))  # type: ignore[union-attr]
            opened.repeats_samples(0 if batch.weight else batch.samples)
            batch = batch.batch
        self._passes.drew(opened, self.samples_in(batch), lambda drawn: lacks_samples(batch, drawn))
        return batch

    def _next_after_scope(self) -> Any:
        if self.batches is None or (self.opened is not None and self.opened.exhausted):
            raise StopIteration
        batch = next(self.batches)
        return batch.batch if type(batch) is Part else batch

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
