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
from parwrap.data.loops import Start
from parwrap.data.samplers import Count, DealtBatches, in_rounds, samples_in
from parwrap.data.sources import PassIterator, PassIterators, Read
from parwrap.errors import UsageError
from parwrap.intercept.dali import pipelines_of, readers_of
from parwrap.loop import random_streams
from parwrap.loop.one_pass import Pass
from parwrap.options import Options
from parwrap.places import Line, Place, script_place, warn
from parwrap.ranks.group import Group, is_alone

__all__ = ["Pipelines"]

ANOTHER_SOURCE = 1_000_003
"""The distance between the seeds of two pipelines, so that pipelines that a loop zips never pair a sample with itself."""


class Pipelines:
    """Gives each rank its share of pipelines that train.

    Args:
        group: the ranks.
        options: a function that returns the options of the innermost running function.
        iterators: makes iterators, and begins and ends their passes.
    """

    def __init__(self, group: Group, options: Callable[[], Options], iterators: PassIterators) -> None:
        self._rank, self._size, self._options, self._iterators = group.world.rank, group.world.size, options, iterators
        self._streams = iterators.passes.streams
        self._sharded: weakref.WeakKeyDictionary[Any, Held] = weakref.WeakKeyDictionary()  # operators that got a shard
        self._built: weakref.WeakKeyDictionary[Any, Held] = weakref.WeakKeyDictionary()  # pipelines with such a reader
        self._dealt: weakref.WeakSet[Any] = weakref.WeakSet()  # iterators whose last pass was dealt
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
            seed = (self._streams.seed() + ANOTHER_SOURCE * self._seeds) % 2**62
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
        return original(iterator) if is_alone() else PassIterator(self._iterators, self, iterator, original)

    def start(self, loader: Any, stack: tuple[Line, ...]) -> Start:
        return self._iterators.loops.start(stack, loader, _reads_part(loader))

    def read(self, iterator: PassIterator, opened: Pass) -> Read:
        dali = iterator.loader
        readers, is_part = readers_of(pipelines_of(dali)), _reads_part(dali)
        deals = opened.trains and bool(readers) and not is_part
        (self._dealt.add if deals else self._dealt.discard)(dali)
        for each in self._iterators.passes.over(dali):  # DALI's iterator has one position, so its passes do not nest
            self._iterators.passes.end(each)
        opened.shared = opened.trains and (is_part or deals)
        opened.data = self._digits(dali, readers) if opened.trains else ()
        opened.whole = next((metas[0]["epoch_size"] for metas in readers.values()), None)
        with self._streams.used(random_streams.NONE):
            batches = _rest(iterator.original(dali), lambda: self._ended(opened, is_part))
        if deals:
            uneven = "drop" if self._options().uneven == "drop" else "pad"
            batches = iter(DealtBatches(batches, self._rank, self._size, uneven))
        opened.counting = lambda batches, exhausted: Count(opened.samples, 0)
        return Read(batches)

    @staticmethod
    def samples_in(batch: Any) -> int:
        """The number of samples in ``batch``, a list with one entry for each pipeline."""
        return sum(samples_in(part) for part in batch)

    def _ended(self, opened: Pass, is_part: bool) -> None:
        """Warn, once for its line, of a pass over a part that was read to its end, and in which nothing has trained."""
        place = opened.place
        if (opened.trains and opened.was_used) or not (is_part or opened.shared) or (place, is_part) in self._warned:
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


def _reads_part(dali: Any) -> bool:
    """Whether DALI's readers already read this rank's shard only."""
    return any(map(_is_part, readers_of(pipelines_of(dali)).values()))


def _is_part(metas: list[Mapping[str, Any]]) -> bool:
    """Whether the pipelines together read only some of the shards; ``metas`` describe the reader in each pipeline."""
    return {meta["shard_id"] for meta in metas} < {*range(metas[0]["number_of_shards"])}


def _rest(batches: Iterator, ended: Callable[[], None]) -> Iterator:
    """The remaining ``batches``. A ``for`` statement over DALI's iterator would call ``iter``, which begins another pass."""
    while True:
        try:
            yield next(batches)
        except StopIteration:
            ended()
            return
