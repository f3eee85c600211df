"""The interceptor of pipelines of NVIDIA DALI: each rank's readers read its part of the data, like a rank's share of a loader.

A pipeline is built, and begins to read, before anyone can know whether it is for training. So its reader decides: one that shuffles is for
training, and each rank gets a shard; one that does not is read whole. If it turns out to be trained on, its batches are divided among the
ranks. ``intercept/dali.py`` patches DALI.
"""

from __future__ import annotations

import hashlib
import math
import os
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from parwrap.coordination.call_site import warn
from parwrap.data.passes import Pass, SharedDraws
from parwrap.data.samplers import DealtBatches
from parwrap.data.sharing_options import TrainingData
from parwrap.data.training_share import ANOTHER_LOADER
from parwrap.errors import RankMismatchError
from parwrap.group.group import Group, is_alone
from parwrap.intercept.dali import pipelines_of, readers_of
from parwrap.intercept.interceptor import Interceptor, intercepts
from parwrap.loop.loop_state import Loop
from parwrap.loop.random_streams import RandomStreams
from parwrap.torch_private.pytree import tree_leaves

__all__ = ["Pipelines"]

FILES, DRAWS = "files of a DALI pipeline", "first batch of a DALI pipeline"
"""The purposes of the collectives."""

LISTED = 256
"""The number of file names to compare."""


@dataclass
class _History:
    """The state of one iterator.

    Attributes:
        trains: whether it is trained on, once a pass has shown it.
        has_trained: whether any pass had a backward.
        alike: whether the ranks' batches are the same; ``None`` if unknown.
        agreed: whether the ranks read the same files.
    """

    trains: bool | None = None
    has_trained: bool = False
    alike: bool | None = None
    agreed: bool = False


class Pipelines(Interceptor):
    """Divides what DALI reads among the ranks.

    Args:
        group: the ranks.
        loop: what the training loop has done so far.
        streams: the random streams.
        split: whether the user's batch is that of all ranks together (``batch="global"``).
        began: a function, called when training data is known to be split.
    """

    def __init__(
        self, group: Group, loop: Loop, streams: RandomStreams, split: Callable[[], bool], began: Callable[[TrainingData], None]
    ) -> None:
        self._group, self._loop, self._streams, self._split, self._began = group, loop, streams, split, began
        self._rank, self._size = group.world.rank, group.world.size
        self._sharded: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._built: weakref.WeakKeyDictionary[Any, list[str]] = weakref.WeakKeyDictionary()
        self._histories: weakref.WeakKeyDictionary[Any, _History] = weakref.WeakKeyDictionary()
        self._said: set[str] = set()
        self._seeds = 0
        for kind in (FILES, DRAWS):
            group.coordinator.answer(kind, lambda detail, present: None)  # a rank that has left splits nothing

    @intercepts
    def shard_reader(self, operator: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments that replace those ``given`` to a reader: a shard, if it shuffles and has none.

        A single shard is what a script sets without a launcher.
        """
        shuffles = given.get("random_shuffle") or given.get("shuffle_after_epoch")
        if is_alone() or not shuffles or given.get("num_shards", 1) != 1:
            return {}
        self._sharded[operator] = _listed(given)
        return {"num_shards": self._size, "shard_id": self._rank, "pad_last_batch": True}

    @intercepts
    def build_pipeline(self, pipeline: Any, operators: Collection[Any], seed: int | None) -> tuple[int | None, int]:
        """The seed for ``pipeline``, which differs by rank if it reads a shard, and the size of its batches."""
        size = pipeline.max_batch_size
        if is_alone():
            return seed, size
        listed = [self._sharded[each] for each in operators if each in self._sharded]
        self._built[pipeline] = listed
        if seed is None:
            seed = (self._streams.seed() + ANOTHER_LOADER * self._seeds) % 2**62
            self._seeds += 1
        if not listed:
            return seed, size
        return seed + self._rank, math.ceil(size / self._size) if self._split() else size

    @intercepts
    def make_iterator(self, pipelines: Collection[Any], size: int) -> int | None:
        """The number of ``size`` samples in an epoch of this rank; ``None`` if the pipelines' readers got no shard here."""
        if not any(self._built.get(pipeline) for pipeline in pipelines):
            return None
        self._announce(pipelines)
        return math.ceil(size / self._size) if size > 0 else size

    @intercepts
    def iterate_pipelines(self, iterator: Any, original: Callable[[Any], Iterator]) -> Iterator:
        """A pass over ``iterator``."""
        if is_alone():
            return original(iterator)
        history = self._histories.setdefault(iterator, _History())
        if _reads_part(iterator):
            return self._read_part(iterator, original, history)
        if torch.is_grad_enabled() and (not self._loop.evaluating() if history.trains is None else history.trains):
            return self._deal(iterator, original, history)
        return self._pass(original(iterator), False, True, lambda exhausted, trained: self._check_whole(iterator, history, trained))

    @intercepts
    def length_of_pipelines(self, iterator: Any, original: Callable[[Any], int]) -> int:
        """``len(iterator)``: of the part that this rank sees."""
        whole = original(iterator)
        history = self._histories.get(iterator)
        dealt = history is not None and history.has_trained and history.alike and torch.is_grad_enabled() and not is_alone()
        return math.ceil(whole / self._size) if dealt else whole

    def _pass(self, batches: Iterator, trains: bool, whole: bool, closed: Callable[[bool, bool], None]) -> Pass:
        """Yield ``batches``, which are ``whole`` if all ranks have the same; ``closed`` learns whether the pass was complete and whether it
        trained."""
        loop, before = self._loop, self._loop.backwards
        (loop.opened_pass if trains else loop.opened_evaluation)()

        def all_closed(exhausted: bool) -> None:
            (loop.closed_pass if trains else loop.closed_evaluation)()
            closed(exhausted, loop.backwards > before)

        return Pass(batches, all_closed, lambda batch: loop.drew_batch(whole), loop.reads_in_for if trains else None)

    def _read_part(self, iterator: Any, original: Callable, history: _History) -> Iterator:
        """A pass in which each rank reads another part."""
        evaluates = self._loop.in_eval_mode()
        ours = any(self._built.get(pipeline) for pipeline in pipelines_of(iterator))
        if ours and not evaluates and not history.agreed:
            self._agree(iterator)
            history.agreed = True
        if not evaluates:
            self._announce(pipelines_of(iterator))

        def closed(exhausted: bool, trained: bool) -> None:
            history.has_trained |= trained
            if ours and exhausted and (evaluates or not history.has_trained):
                self._say(
                    f"{_named(iterator)} was read to its end without training, and each rank saw only its share, because it shuffles. To "
                    "read all of it on every rank, remove random_shuffle= and shuffle_after_epoch=."
                )

        return self._pass(original(iterator), not evaluates, False, closed)

    def _agree(self, iterator: Any) -> None:
        """Check that the shards of the ranks come from the same data.

        Raises:
            RankMismatchError: they do not.
        """
        lengths = {name: metas[0]["epoch_size"] for name, metas in readers_of(pipelines_of(iterator)).items()}
        listed = [self._built.get(pipeline) for pipeline in pipelines_of(iterator)]
        views = self._group.exchange(FILES, (lengths, listed))
        if any(view[0] != lengths for view in views.values()):
            counts = ", ".join(f"{view[0]} on rank {rank}" for rank, view in views.items())
            raise RankMismatchError(
                f"{_named(iterator)} finds different numbers of samples on different ranks: {counts}. Every rank must find the same number."
            )
        if any(view[1] != listed for view in views.values()):
            raise RankMismatchError(
                f"{_named(iterator)} got different files on different ranks, or the same files in a different order, so shards overlap. "
                "os.listdir and glob return files in any order: sort them."
            )

    def _deal(self, iterator: Any, original: Callable, history: _History) -> Iterator:
        """A training pass over data that every rank reads whole: its batches are divided among the ranks."""
        with self._streams.shared():
            drawing = original(iterator)
        batches = iter(SharedDraws(_rest(drawing), self._streams))
        if history.alike is None:
            batches, history.alike = self._compared(iterator, batches)
        if history.alike:
            self._announce(pipelines_of(iterator))
            batches = iter(DealtBatches(batches, self._rank, self._size))
        before = self._loop.backwards

        def watched() -> Iterator:
            for batch in batches:
                yield batch
                if self._loop.backwards > before:
                    self._warn_divided(iterator, history)

        def closed(exhausted: bool, trained: bool) -> None:
            if trained:
                self._warn_divided(iterator, history)
            if exhausted and not history.has_trained and history.trains is None:
                history.trains = False
                self._say(
                    f"{_named(iterator)} was read to its end without training, and each rank saw only its share. From the next pass on, "
                    "every rank reads all of it. To read all of it in the first pass too, wrap the loop in torch.no_grad()."
                )

        return self._pass(watched(), True, False, closed)

    def _compared(self, iterator: Any, batches: Iterator) -> tuple[Iterator, bool]:
        """All of ``batches``, and whether they are the same on all ranks, judging by the first."""
        read_alike = all(pipeline in self._built for pipeline in pipelines_of(iterator)) and readers_of(pipelines_of(iterator))
        if read_alike:
            return batches, True
        first = list(zip(range(1), batches, strict=False))
        views = self._group.exchange(DRAWS, _digest(first))
        return chain((batch for _, batch in first), batches), len(set(views.values())) == 1

    def _warn_divided(self, iterator: Any, history: _History) -> None:
        """A pass over ``iterator`` had a backward."""
        if history.has_trained:
            return
        history.has_trained = True
        if history.alike:
            self._say(
                f"{_named(iterator)} is read completely by every rank. Now that the loop trains on it, its batches are divided among the "
                "ranks, and its len(), which was that of the whole, becomes that of this rank's share. To divide the reading too, pass "
                "the reader random_shuffle=True, or num_shards=parwrap.world_size() and shard_id=parwrap.rank()."
            )
        else:
            self._say(
                f"{_named(iterator)} gives different batches on different ranks, so parwrap does not divide them: each rank trains on "
                "everything that it reads. This is correct if you shard the data yourself. If not, build the pipeline inside the "
                "function or script that parwrap runs. If it reads an external source, let the source draw random numbers from torch, "
                "np.random or random."
            )

    def _check_whole(self, iterator: Any, history: _History, trained: bool) -> None:
        if trained and not self._loop.passes and not history.trains:
            history.trains = history.has_trained = True
            self._say(
                f"{_named(iterator)} was read in eval() mode or before any optimizer was built, but the loop then trained on it: every "
                "rank trained on all of it. From the next pass on, its batches are divided among the ranks."
            )

    def _announce(self, pipelines: Collection[Any]) -> None:
        samples = [metas[0]["epoch_size"] for metas in readers_of(pipelines).values()]
        size = sum(pipeline.max_batch_size for pipeline in pipelines)
        self._began(TrainingData(samples[0] if samples else None, size, size * self._size))

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            warn(f"parwrap: {text}")


def _rest(batches: Iterator) -> Iterator:
    """The remaining ``batches``: ``iter`` of one of DALI's iterators would begin another pass."""
    while True:
        try:
            yield next(batches)
        except StopIteration:
            return


def _reads_part(iterator: Any) -> bool:
    """Whether the pipelines of ``iterator`` read only some shards of the data."""
    readers = readers_of(pipelines_of(iterator)).values()
    return any({meta["shard_id"] for meta in metas} < {*range(metas[0]["number_of_shards"])} for metas in readers)


def _named(iterator: Any) -> str:
    names = [repr(name) for name in readers_of(pipelines_of(iterator))]
    return f"a DALI iterator over the reader {' and '.join(names)}" if names else "a DALI iterator over an external source"


def _listed(given: Mapping[str, Any]) -> str:
    """A short digest, equal for readers that were ``given`` the same files and labels, in any directory."""
    described = []
    for name, values in sorted(given.items()):
        if isinstance(values, (list, tuple)) and values and isinstance(values[0], (str, os.PathLike)):
            some = [os.fspath(value) for value in values[:: max(1, len(values) // LISTED)]]
            start = len(os.path.commonpath(some)) if len(some) > 1 else len(some[0])
            described.append((name, len(values), [each[start:] for each in some]))
        elif isinstance(values, (list, tuple)) and values and isinstance(values[0], int):
            described.append((name, len(values), [*values[:: max(1, len(values) // LISTED)]]))
    return hashlib.blake2b(repr(described).encode(), digest_size=16).hexdigest()


def _digest(batches: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for leaf in tree_leaves(batches):
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
            digest.update(
                f"{tuple(leaf.shape)}{leaf.dtype}".encode() + leaf.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            )
    return digest.hexdigest()
