"""What each rank reads of a pipeline of NVIDIA DALI.

A pipeline is built, and reads ahead, before parwrap knows whether a pass trains, so its reader decides. A reader that shuffles is for
training: each rank builds it for its own shard. Any other pipeline is read whole, and the batches of its training passes are dealt to the
ranks. ``intercept/dali.py`` patches DALI.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from parwrap.checks.same_data import Held
from parwrap.data.samplers import Count, DealtBatches, in_rounds, samples_in
from parwrap.data.sources import PassIterator, Sources
from parwrap.errors import UsageError
from parwrap.intercept.dali import pipelines_of, readers_of
from parwrap.loop import random_streams
from parwrap.loop.one_pass import Pass
from parwrap.places import Place, script_place, warn
from parwrap.ranks.group import is_alone

__all__ = ["Pipelines"]

ANOTHER_SOURCE = 1_000_003
"""The distance between the seeds of two pipelines, so that pipelines that a loop zips never pair a sample with itself."""


class Pipelines(Sources):
    """Gives each rank its share of pipelines that train; arguments are those of :class:`parwrap.data.sources.Sources`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._sharded: weakref.WeakKeyDictionary[Any, Held] = weakref.WeakKeyDictionary()  # operators that got a shard
        self._built: weakref.WeakKeyDictionary[Any, Held] = weakref.WeakKeyDictionary()  # pipelines with such a reader
        self._dealt: weakref.WeakSet[Any] = weakref.WeakSet()  # iterators whose last pass was dealt
        self._last: weakref.WeakKeyDictionary[Any, Pass] = weakref.WeakKeyDictionary()  # the last pass over each iterator
        self._seeds = 0
        self._warned: set[tuple[Place, bool]] = set()

    def shard_reader(self, operator: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        shuffles = given.get("random_shuffle") or given.get("shuffle_after_epoch")
        if is_alone() or not shuffles or given.get("num_shards", 1) != 1:
            return {}
        held = self._sharded[operator] = Held()
        held.add([value for _, value in sorted(given.items()) if isinstance(value, (list, tuple))])
        return {"num_shards": self._size, "shard_id": self._rank, "pad_last_batch": True}

    def build_pipeline(self, pipeline: Any, operators: Collection[Any], seed: int | None) -> tuple[int | None, int]:
        size = pipeline.max_batch_size
        if is_alone():
            return seed, size
        if seed is None:
            seed = (self._passes.streams.seed() + ANOTHER_SOURCE * self._seeds) % 2**62
            self._seeds += 1
        held = next((self._sharded[each] for each in operators if each in self._sharded), None)
        if held is None:
            return seed, size
        self._built[pipeline] = held
        if self._options().batch == "global":
            if size % self._size:
                raise UsageError(
                    f'{script_place()} builds a DALI pipeline with batches of {size}, which batch="global" cannot divide evenly among '
                    f"{self._size} ranks. Choose a batch_size that is a multiple of {self._size}."
                )
            size //= self._size
        return seed + self._rank, size

    def make_iterator(self, pipelines: Collection[Any], size: int) -> int | None:
        if not any(pipeline in self._built for pipeline in pipelines):
            return None
        return math.ceil(size / self._size) if size > 0 else size

    def length_of_pipelines(self, iterator: Any, original: Callable[[Any], int]) -> int:
        whole = original(iterator)
        if iterator not in self._dealt or is_alone():
            return whole
        return in_rounds(whole, self._size, self._options().uneven)

    def iterate_pipelines(self, iterator: Any, original: Callable[[Any], Iterator]) -> Iterator:
        return original(iterator) if is_alone() else _Iteration(self, iterator, original)

    def begin(self, iteration: _Iteration) -> None:
        iterator = iteration.iterator
        readers = readers_of(pipelines_of(iterator))
        iteration.is_part = is_part = any(_is_part(metas) for metas in readers.values())
        start = self._loops.start(iteration.stack, iterator, is_part)
        training = not start.why_whole
        deals = training and bool(readers) and not is_part
        (self._dealt.add if deals else self._dealt.discard)(iterator)
        data = self._digits(iterator, readers) if training else ()
        iteration.opened = opened = Pass(training, training and (is_part or deals), iteration.place, start.why_whole, data=data)
        last, self._last[iterator] = self._last.get(iterator), opened
        if last is not None and self._passes.is_open(last):  # the garbage collector may have found what read it
            self._passes.end(last)
        self._loops.begin(start, opened)
        opened.whole = next((metas[0]["epoch_size"] for metas in readers.values()), None)
        self._begins(training)
        with self._passes.streams.used(random_streams.NONE):
            iteration.batches = _rest(iteration.original(iterator))
        if deals:
            uneven = "drop" if self._options().uneven == "drop" else "pad"
            iteration.batches = iter(DealtBatches(iteration.batches, self._rank, self._size, uneven))
        self._totals.begins(iterator, opened, lambda batches, exhausted: Count(opened.samples, 0))
        self.go_on(iteration)

    def end(self, iteration: _Iteration, exhausted: bool) -> None:
        super().end(iteration, exhausted)
        opened, place, is_part = iteration.opened, iteration.place, iteration.is_part
        if not exhausted or (opened.trains and opened.was_used) or not (is_part or opened.shared) or (place, is_part) in self._warned:
            return
        self._warned.add((place, is_part))
        remedies = ["remove num_shards=, random_shuffle= and shuffle_after_epoch="] * is_part
        remedies += ["wrap the loop in torch.no_grad()"] * opened.trains
        warn(
            f"parwrap: {place} read a DALI pipeline, and no backward followed: what was computed covers only this rank's share. For every "
            f"rank to read everything, {' and '.join(remedies)}."
        )

    def _digits(self, iterator: Any, readers: Mapping[str, list[Mapping[str, Any]]]) -> tuple[int, ...]:
        """Digits of a hash of what must be the same on all ranks. They travel with the first backward."""
        held = next((self._built[each] for each in pipelines_of(iterator) if each in self._built), Held())
        return held.digits(str([(name, metas[0]["epoch_size"]) for name, metas in readers.items()]))


class _Iteration(PassIterator):
    """The iterator of one pass. Its batches are lists with one entry for each pipeline.

    Attributes:
        opened: the pass.
        is_part: whether DALI's readers already read this rank's shard only.
    """

    opened: Pass
    is_part: bool

    def __init__(self, pipelines: Pipelines, iterator: Any, original: Callable[[Any], Iterator]) -> None:
        super().__init__(pipelines)
        self.iterator, self.original = iterator, original

    @staticmethod
    def samples_in(batch: Any) -> int:
        return sum(samples_in(part) for part in batch)


def _is_part(metas: list[Mapping[str, Any]]) -> bool:
    """Whether the pipelines together read only some of the shards; ``metas`` describe the reader in each pipeline."""
    return {meta["shard_id"] for meta in metas} < {*range(metas[0]["number_of_shards"])}


def _rest(batches: Iterator) -> Iterator:
    """The remaining ``batches``. A ``for`` statement over DALI's iterator would call ``iter``, which begins another pass."""
    while True:
        try:
            yield next(batches)
        except StopIteration:
            return
