"""How a pass begins at its first ``next`` and ends once, whatever it reads. Which passes train: ``loops.py``.

``loaders.py`` and ``dali.py`` decide what each rank reads of DataLoaders and of DALI's pipelines.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from operator import length_hint
from typing import Any, NamedTuple, Protocol

from parwrap.data.loops import Loops, Start
from parwrap.data.samplers import lacks_samples
from parwrap.data.streams import Part
from parwrap.data.totals import Totals
from parwrap.intercept.intercepted_calls import Batches
from parwrap.loop import random_streams
from parwrap.loop.one_pass import Batch, Pass
from parwrap.loop.passes import Passes, script_drops
from parwrap.places import Line, call_stack, place_of
from parwrap.ranks.group import say

__all__ = ["PassIterator", "PassIterators", "Read", "Source"]


class Read(NamedTuple):
    """What a rank reads in a pass.

    Attributes:
        batches: the iterator of its batches.
        libraries: the libraries that draw from this rank's own streams while it reads a batch.
        most: if the sampler has no length: so many samples on one rank show that it has no end. 0 otherwise.
    """

    batches: Iterator
    libraries: random_streams.Libraries = random_streams.NONE
    most: int = 0


class Source(Protocol):
    """What passes read: DataLoaders, or DALI's pipelines."""

    def start(self, loader: Any, stack: tuple[Line, ...]) -> Start:
        """How a pass over ``loader`` starts that is asked for at ``stack``."""

    def read(self, iterator: PassIterator, opened: Pass) -> Read:
        """Decide what this rank reads in the pass ``opened`` of ``iterator``, which begins, and note in ``opened`` what that is."""

    def samples_in(self, batch: Any) -> int:
        """The number of samples in ``batch``."""


class PassIterators:
    """Makes the iterators that scripts read, and begins, continues and ends their passes.

    Args:
        passes: the open passes.
        loops: what parwrap remembers of the script's loops.
        totals: what the numbers that the script computes from passes cover.
        begins: called when the loop begins a pass, with whether it trains.
        size: the number of ranks.
    """

    def __init__(self, passes: Passes, loops: Loops, totals: Totals, begins: Callable[[bool], None], size: int) -> None:
        self.passes, self.loops, self._totals, self._begins, self._size = passes, loops, totals, begins, size
        self._last: weakref.WeakKeyDictionary[Any, Pass] = weakref.WeakKeyDictionary()  # the last pass over each loader
        self._reading: weakref.WeakSet[PassIterator] = weakref.WeakSet()
        self._undo = ExitStack()
        self.script_drops = self._undo.enter_context(script_drops())

    def last(self, loader: Any) -> Pass | None:
        """The last pass over ``loader``."""
        return self._last.get(loader)

    def begin(self, iterator: PassIterator) -> Read:
        """Begin the pass of ``iterator``, at its first ``next``."""
        loader, passes = iterator.loader, self.passes
        start = iterator.source.start(loader, iterator.stack)
        last, trains = self.last(loader), not start.why_whole
        opened = Pass(trains, False, iterator.place, start.why_whole, iterator.stack, loader=weakref.ref(loader))
        for each in passes.over(loader):
            if trains or not each.trains:  # it may be read on, but the script may hold its iterator for nothing
                passes.end(each)
        self.loops.begin(start, opened)
        if not opened.in_thread:
            self._begins(trains)
        opened.repeats = last is not None and last.place == opened.place and not last.exhausted and (last.repeats or last.was_used)
        iterator.opened = self._last[loader] = opened
        read = iterator.source.read(iterator, opened)
        if opened.in_thread:  # when it begins depends on the clock
            opened.data = ()
        self._totals.begins(loader, opened)
        self.go_on(iterator)
        iterator.loader = None  # which may hold this iterator: its workers end with the last reference
        return read

    def go_on(self, iterator: PassIterator) -> None:
        """Open the pass of ``iterator``: it begins, or the script reads on after another pass has ended it."""
        self.passes.begin(iterator.opened)
        self._reading.add(iterator)

    def end(self, opened: Pass, exhausted: bool) -> None:
        """End the pass ``opened``; ``exhausted`` says whether it was read to its end."""
        opened.exhausted = exhausted
        self.passes.end(opened)
        self.loops.end(opened)
        if self.passes.in_loop():
            self.passes.draw()
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
        for iterator in list(self._reading):
            iterator.detach()
        self._undo.close()


class PassIterator(Batches):
    """The iterator of one pass over ``loader``. It begins at its first ``next``, and ends once: when it is exhausted or dropped.

    Args:
        owner: begins and ends its pass.
        source: says what this rank reads.
        loader: the DataLoader, or DALI's iterator.
        original: makes the library's own iterator.
        workers_seed: the seed of workers that was drawn as torch draws it; ``None`` if none was.

    Attributes:
        place: the line that reads it.
        stack: the calls that lead to that line.
        opened: the pass, once it has begun.
        dataset: the dataset of ``loader`` when the iterator was made.
        rows: with ``batch="whole"``, the iterator of torch, and what draws this rank's part of each batch.
        batches: the iterator that it takes batches from, once it has begun.
    """

    opened: Pass
    dataset: Any
    rows: Any = None

    def __init__(
        self, owner: PassIterators, source: Source, loader: Any, original: Callable[[Any], Iterator], workers_seed: int | None = None
    ) -> None:
        super().__init__(None)
        frame = sys._getframe(1)
        lines = call_stack(frame)
        self.place, self.stack = place_of(lines, frame), owner.loops.stack(lines)
        last = owner.last(loader)
        if last is not None and last.exhausted and lines and _handles_end(lines[-1]):
            self.stack = last.stack  # its loop goes on
        self.source, self.loader, self.original, self.workers_seed = source, loader, original, workers_seed
        self._loader = weakref.ref(loader)
        self._owner: PassIterators | None = owner
        self._libraries, self._most = random_streams.NONE, 0
        self._lock = threading.RLock()

    def __next__(self) -> Any:
        with self._lock:  # several threads may read one iterator: the pass begins once, and counts each batch
            owner, begins = self._owner, self.batches is None
            if owner is None:
                return self._next_after_scope()
            passes = owner.passes
            if begins:
                self.batches, self._libraries, self._most = owner.begin(self)
            elif self.opened not in passes.open:
                owner.go_on(self)
            opened, asked, in_loop = self.opened, time.perf_counter(), passes.in_loop()
            before = passes.streams.use(self._libraries) if in_loop else None
            try:
                batch = next(self.batches)  # type: ignore[arg-type]
            except StopIteration:
                self.finish(exhausted=True)
                raise
            except BaseException:  # the script may go on with the next batch
                if opened.weights:
                    opened.weights.popleft()
                raise
            if in_loop and (begins or before is not self._libraries):
                passes.draw()
            if not opened.trains:
                passes.drew(opened, 0, in_loop)
                if opened.rows is None:
                    return batch
                passes.clock.data += time.perf_counter() - asked
                return opened.rows(batch)
            passes.clock.data += time.perf_counter() - asked
            if type(batch) is Part:
                opened.weights.append(Batch(batch.samples, batch.weight))  # type: ignore[union-attr]
                opened.repeats_samples(0 if batch.weight else batch.samples)
                batch = batch.batch
            passes.drew(opened, self.source.samples_in(batch), in_loop, lambda drawn: lacks_samples(batch, drawn))
            if self._most and opened.samples > self._most:
                self._most = 0
                owner.say_endless(opened)
            return batch

    def _next_after_scope(self) -> Any:
        if self.batches is None or self.opened.exhausted:
            raise StopIteration
        batch = next(self.batches)
        return batch.batch if type(batch) is Part else batch

    def __len__(self) -> int:
        loader = self._loader()
        return length_hint(self.batches, 0) if loader is None else len(loader)

    def finish(self, exhausted: bool) -> None:
        """End the pass, which was read to its end if ``exhausted``, and dropped otherwise."""
        owner = self.detach()
        if owner is not None and self.batches is not None:
            if not exhausted:
                self.batches = iter(())  # workers of torch's iterator end with it
            owner.end(self.opened, exhausted)

    def detach(self) -> PassIterators | None:
        """Let the script read on without a scope. Returns what began the pass; ``None`` if this was called before."""
        owner, self._owner = self._owner, None
        return owner

    def __del__(self) -> None:
        owner = getattr(self, "_owner", None)
        # If the script has dropped it, its pass ends now. If the garbage collector has found it, the next pass over its loader ends it.
        if owner is not None and owner.script_drops():
            self.finish(exhausted=False)


def _handles_end(line: Line) -> bool:
    """Whether ``line`` is in the ``except StopIteration`` block of its function."""
    error, traceback = sys.exc_info()[1:]
    if not isinstance(error, StopIteration) or traceback is None:
        return False
    code = traceback.tb_frame.f_code
    return (line.file, line.function) == (code.co_filename, code.co_firstlineno)
