"""What each rank reads of a DataLoader, and what ``len(loader)`` returns (contract, rules 2 and 3).

``loops.py`` says which passes train, ``loader_lengths.py`` which pass a length belongs to.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from operator import length_hint
from typing import Any, cast

import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

from parwrap.checks.same_data import Held, data_digits, held_by
from parwrap.data.counts import counting
from parwrap.data.loader_lengths import Lengths, of_script, shows_share, stands_above
from parwrap.data.loops import WHOLE_BATCH, Start
from parwrap.data.samplers import (
    DealtBatches,
    SplitBatches,
    batches_by_size,
    copied_with,
    distributed_sampler,
    divides_itself,
    drawing_with,
    drawn_in,
    draws_of,
    is_plain,
    refuse_nothing,
    resampled,
    samples_in,
    share_length,
    shuffles,
)
from parwrap.data.sources import PassIterator, PassIterators, Read
from parwrap.data.stateful import Reading, forwarded_states, take_state
from parwrap.data.streams import CollatePart, EndsTogether, part_of_stream, was_split
from parwrap.errors import UsageError, counted
from parwrap.intercept.interceptor import Interceptor
from parwrap.loop import random_streams
from parwrap.loop.one_pass import Batch, Pass
from parwrap.loop.optimizers import Optimizers
from parwrap.options import Options
from parwrap.places import Line, Place, call_stack, script_place, warn
from parwrap.ranks.device import cores
from parwrap.ranks.environment import attribute
from parwrap.ranks.group import Group, is_alone, is_on_one_rank
from parwrap.rows.reading import OwnParts, RowsOf, reads_own
from parwrap.rows.tensors import Whole
from parwrap.torch_private.dataloader import kept_iterator

__all__ = ["Loaders", "is_replicated", "key_of", "marked_like", "replicate", "shard"]

TORCHS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""The samplers that draw from torch's stream, once for each pass."""

_sharded: weakref.WeakSet[DataLoader] = weakref.WeakSet()
_replicated: weakref.WeakSet[DataLoader] = weakref.WeakSet()
"""The loaders that the script has passed to :func:`shard` and to :func:`replicate`, in any scope."""


def shard(loader: DataLoader) -> DataLoader:
    """Say that every pass over ``loader`` trains: each rank reads its share, also before an optimizer is built or in eval mode.

    An open pass goes on as it began.

    Args:
        loader: the loader.

    Returns:
        The same loader.

    >>> loader = DataLoader(range(4))
    >>> shard(loader) is loader
    True
    """
    return _marked("shard", loader, _sharded, _replicated)


def replicate(loader: DataLoader) -> DataLoader:
    """Say that every rank reads all of ``loader``, also in training passes. An open pass goes on as it began.

    Args:
        loader: the loader.

    Returns:
        The same loader.

    >>> loader = DataLoader(range(4))
    >>> replicate(loader) is loader
    True
    """
    return _marked("replicate", loader, _replicated, _sharded)


def _marked(name: str, loader: Any, these: weakref.WeakSet[DataLoader], others: weakref.WeakSet[DataLoader]) -> DataLoader:
    if not isinstance(loader, DataLoader):
        raise UsageError(f"parwrap.{name}() takes a torch DataLoader, not {type(loader).__name__}: wrap the data in DataLoader(...) first.")
    others.discard(loader)
    these.add(loader)
    return loader


def _inside_iter(loader: DataLoader, dataset: Any) -> DataLoader:
    """A copy of ``loader`` over ``dataset``, which its class shows only while ``__iter__`` runs."""
    cls = type(loader)
    copy: DataLoader = object.__new__(type(cls.__name__, (cls,), {"__getattribute__": object.__getattribute__}))
    vars(copy).update(vars(loader), dataset=dataset)
    marked_like(copy, loader)
    return copy


def is_replicated(loader: DataLoader) -> bool:
    """Whether the script called :func:`replicate`, and not :func:`shard` since, for ``loader`` or the loader that it is a copy of."""
    return loader in _replicated


def marked_like(copy: DataLoader, loader: DataLoader) -> None:
    """Mark ``copy`` as sharded or replicated if ``loader`` is, and only then."""
    for marked in (_sharded, _replicated):
        (marked.add if loader in marked else marked.discard)(copy)


@dataclass(eq=False)
class _Known:
    """What is known about a loader.

    Attributes:
        trained: whether ranks have read shares of it.
        resumed: the seed of the order that a loaded state continues.
        sampler: the ``DistributedSampler`` of the copy that is read, if it has one.
        copy: the copy that is read, if its workers persist or if it has a state.
        held: hashes of what it reads, and the number of backwards when they were computed.
        hashed: how often they were computed.
        iterated: the last iterator made over it, whose pass may not have begun yet.
    """

    trained: bool = False
    resumed: int | None = None
    sampler: DistributedSampler | None = None
    copy: DataLoader | None = None
    held: tuple[Held, int] | None = None
    hashed: int = 0
    iterated: weakref.ref[PassIterator] | None = None


def too_many(workers: int, ranks: int, available: int) -> bool:
    """Whether ``ranks`` with so many ``workers`` each start more than twice as many as there are cores. Some wait for a disk.

    >>> too_many(8, 8, 8), too_many(2, 8, 8), too_many(4, 1, 1)
    (True, False, False)
    """
    return ranks > 1 and ranks * workers > 2 * available


class Loaders(Interceptor):
    """Gives each rank its share of training passes, and everything of all other passes and of replicated loaders.

    Args:
        group: the ranks.
        options: a function that returns the options of the innermost running function.
        optimizers: the optimizers of the script.
        iterators: makes iterators, and begins and ends their passes.
        say: prints a line on rank 0.
        whole: what is open with ``batch="whole"``; ``None`` otherwise.
    """

    samples_in = staticmethod(samples_in)

    def __init__(
        self,
        group: Group,
        options: Callable[[], Options],
        optimizers: Optimizers,
        iterators: PassIterators,
        say: Callable[[str], None] = lambda text: None,
        whole: Whole | None = None,
    ) -> None:
        self._say, self._said_workers, self._whole = say, False, whole
        self._group, self._rank, self._size = group, group.world.rank, group.world.size
        self._options, self._optimizers, self._iterators = options, optimizers, iterators
        self._passes, self._loops = iterators.passes, iterators.loops
        self._known: weakref.WeakKeyDictionary[DataLoader, _Known] = weakref.WeakKeyDictionary()
        self._lengths = Lengths()

    def forwarding_states(self) -> AbstractContextManager[None]:
        """Inside the block, the state of a stateful loader is that of the copy that this rank reads."""
        return forwarded_states(self._reading, self._resume)

    # passes

    def iterate(self, loader: DataLoader, original: Callable[[DataLoader], Iterator]) -> Iterator:
        if get_worker_info() is not None or is_alone():
            if not is_on_one_rank():  # what one rank reads by itself changes no loop
                self._passes.note_modes()
            return original(loader)
        made = PassIterator(self._iterators, self, loader, original, None if loader.num_workers else self._workers_seed(loader))
        made.dataset = loader.dataset
        if self._whole is not None:
            made.rows = self._begin_rows(loader, made.workers_seed, original)
        self.known(loader).iterated = weakref.ref(made)
        return made

    def _count_workers(self, workers: int, place: Place) -> None:
        """Say once that this node starts many more workers than it has cores: a script that starts one for each core does, on each rank."""
        ranks, available = self._group.world.local_size, cores()
        if too_many(workers, ranks, available):
            self._said_workers = True
            self._say(
                f"the loader read at {place} starts {workers} workers on each of {ranks} ranks of this node, on "
                f"{counted(available, 'core')}. num_workers={max(1, available // ranks)} is a worker for each core"
            )

    def starts_thread(self, thread: threading.Thread) -> None:
        self._loops.starts_thread(thread, sys._getframe(1))

    def start(self, loader: DataLoader, stack: tuple[Line, ...]) -> Start:
        """How a pass over ``loader`` starts that is asked for at ``stack``. A loaded state of a share continues that share."""
        if self._whole is not None:
            return WHOLE_BATCH
        return self._loops.start(stack, key_of(loader), _reads_anew(loader), loader in _sharded or self.known(loader).resumed is not None)

    def read(self, iterator: PassIterator, opened: Pass) -> Read:
        loader: DataLoader = iterator.loader
        known = self.known(loader)
        if loader.dataset is not iterator.dataset:
            loader = _inside_iter(loader, iterator.dataset)
        if self._whole is not None:
            return self._read_rows(iterator, loader, opened, self._whole)
        stream = isinstance(loader.dataset, IterableDataset)
        opened.shared, opened.sharded = opened.trains and loader not in _replicated, loader in _sharded
        # without workers it was drawn when the iterator was made; with workers, torch reads ahead then: its sampler draws next
        seed = self._workers_seed(loader) if opened.trains and loader.num_workers else iterator.workers_seed
        self._check_lengths(iterator.loader, opened, first=not known.trained)
        if loader.num_workers and not self._said_workers:
            self._count_workers(loader.num_workers, opened.place)
        if opened.shared:
            with self._drawing():
                copy = self._share(loader, known, opened)
                refuse_nothing(loader, copy, self._size, self._options().uneven)
                opened.data = data_digits(loader, self._held(loader, known), opened.seed, self._passes.begun)
            opened.weights = _weights(copy)
        else:
            copy = self._drawing_alike(loader) if opened.trains else loader
            if self._loops.gradients_on() and loader not in _replicated:
                self._passes.whole_at = self._passes.whole_at or opened.place
                held = Held() if self._passes.draws_own else self._held(loader, known)  # where ranks draw their own data, it may differ
                opened.data = held.digits("everything on every rank", str(self._passes.begun))
        dealt = stream and opened.shared and not was_split(copy.dataset)
        draws_own = opened.trains and not dealt  # workers of a stream that is dealt draw alike on all ranks
        if seed is not None and draws_own and (opened.shared or not stream):
            seed += self._rank  # augmentation is each rank's own
        batches = self._begin(iterator, copy, opened, seed, may_end_apart=draws_own and stream)
        opened.whole, opened.length = _samples(loader), _batches(batches)
        most = 0
        if opened.shared:
            take_state(loader)
            if loader.persistent_workers or hasattr(loader, "state_dict"):
                known.copy = copy
            known.trained = True
            opened.counting = counting(copy)
            most = _endless_from(loader) if self._size > 1 and self._options().batch != "global" else 0
        return Read(batches, self._own_streams(loader) if draws_own else random_streams.NONE, most)

    def _read_rows(self, iterator: PassIterator, loader: DataLoader, opened: Pass, whole: Whole) -> Read:
        """Read whole batches, of which this rank holds its rows."""
        assert iterator.rows is not None
        batches, parts = iterator.rows
        known = self.known(loader)
        if loader.batch_size is not None and loader.batch_size < self._size and not known.trained:
            known.trained = True
            warn(
                f"parwrap: the loader at {script_place()} makes batches of {counted(loader.batch_size, 'sample')}, which {self._size} "
                "ranks cannot share: with batch='whole' every rank computes all of each. Use larger batches, or fewer ranks."
            )
        if self._loops.gradients_on():
            opened.data = self._held(loader, known).digits("whole batches", str(self._passes.begun))
        opened.whole, opened.length = _samples(loader), _batches(batches)
        if loader not in _replicated:
            opened.rows = RowsOf(whole, self._group, parts, samples_in)
        return Read(batches, random_streams.NONE if parts is None else self._own_streams(loader))

    def _begin_rows(
        self, loader: DataLoader, seed: int | None, original: Callable[[DataLoader], Iterator]
    ) -> tuple[Iterator, OwnParts | None]:
        """Begin to read ``loader`` as its iterator is made, as torch does, which draws there. Returns what draws this rank's parts, too."""
        known = self.known(loader)
        seed = self._workers_seed(loader) if loader.num_workers else seed
        if loader in _replicated or not reads_own(loader):
            parts, copy = None, loader
        elif loader.persistent_workers and known.copy is not None and kept_iterator(known.copy) is not None:
            copy = known.copy
            parts = cast(OwnParts, copy.batch_sampler)
        else:
            parts = OwnParts(_SharedDraws(draws_of(loader), self), self._rank, self._size)
            copy = drawing_with(loader, parts)
            vars(copy)["in_order"] = True
            known.copy = copy if loader.persistent_workers else None
        if seed is not None and parts is not None:
            seed += self._rank  # augmentation is each rank's own
        with self._drawing(), _seeding_workers(copy, seed):
            return original(copy), parts

    def _drawing_alike(self, loader: DataLoader) -> DataLoader:
        """A copy of ``loader`` whose sampler draws the same on all ranks, which read all of it: in a training pass each draws its own.

        It is ``loader`` itself if its dataset draws the order, or if the iterator that it keeps does.
        """
        if isinstance(loader.dataset, IterableDataset) or loader.persistent_workers or hasattr(loader, "state_dict"):
            return loader
        return drawing_with(loader, _SharedDraws(draws_of(loader), self))

    def _held(self, loader: DataLoader, known: _Known) -> Held:
        """Hashes of what ``loader`` reads, which the script may have changed since they were computed. All ranks compute them alike."""
        backwards = self._passes.backwards
        if known.held is None or known.hashed < FIRST_PASSES or backwards - known.held[1] >= HASHED_EVERY:
            known.held, known.hashed = (held_by(loader), backwards), known.hashed + 1
        return known.held[0]

    def _begin(self, iterator: PassIterator, loader: DataLoader, opened: Pass, seed: int | None, may_end_apart: bool) -> Iterator:
        """Begin to read ``loader``. If it is a stream whose parts ``may_end_apart``, ranks that step together also end together."""

        def begin() -> Iterator:
            with self._drawing(), _seeding_workers(loader, seed):
                return iterator.original(loader)

        options = self._options()
        if opened.in_thread or not (may_end_apart and options.waits):
            return begin()
        opened.weights = deque() if options.uneven == "join" else None
        return EndsTogether(begin, self._group, options.uneven, opened.repeats_samples)

    def _share(self, loader: DataLoader, known: _Known, opened: Pass) -> DataLoader:
        """The copy of ``loader`` that this rank reads in ``opened``, which gets the seed of its order."""
        options, rank, size = self._options(), self._rank, self._size
        sampler = _sampler(loader)
        divides = loader.batch_size is not None or loader.batch_sampler is not None
        together = divides and (options.batch == "global" or (options.uneven == "join" and is_plain(loader)))
        if options.batch == "global" and not divides:
            warn(
                f"parwrap: the loader at {script_place()} has batch_size=None, so its items cannot be divided: even with batch='global' "
                f"each rank takes whole items, and a step trains on {size} of them. Let the loader make the batches, with batch_size= or "
                "batch_sampler=, to keep the weights of one process."
            )
        if options.batch == "global" and known.copy is None and loader.batch_size is not None and loader.batch_size < size:
            warn(
                f"parwrap: the loader at {script_place()} makes batches of {counted(loader.batch_size, 'sample')}, which {size} ranks "
                "cannot share: with batch='global' those without a part repeat a sample with weight 0. Use batch='per_rank' (--batch "
                "per-rank), with which each rank takes whole batches, or larger batches, or fewer ranks."
            )
        by_torch = type(sampler) is DistributedSampler or (is_plain(loader) and not together)
        opened.seed, known.resumed = self._seed(loader, sampler, by_torch) if known.resumed is None else known.resumed, None
        share = known.copy
        if loader.persistent_workers and share is not None and kept_iterator(share) is not None:
            if known.sampler is not None:
                known.sampler.seed = opened.seed
            return share
        if isinstance(loader.dataset, IterableDataset):
            return copied_with(loader, **part_of_stream(loader, rank, size, options))
        if divides_itself(sampler, rank, size):
            self._refuse_global(loader, sampler)
            return copied_with(loader)
        batches: Any = None
        if by_torch:
            dealt = not (together or batches_by_size(loader))
            known.sampler = self._distributed(loader, sampler, opened.seed, 1 if together or dealt else size)
            batches = resampled(loader, known.sampler)
            if dealt:
                batches = DealtBatches(_SharedDraws(batches, self), rank, size, options.uneven)
        else:
            draws = draws_of(loader)
            if together and options.batch != "global":
                draws = BatchSampler(sampler, (loader.batch_size or 1) * size, loader.drop_last)
            if not together and hasattr(draws, "for_ranks"):  # it puts batches of similar length into a step
                draws = draws.for_ranks(size)
            batches = _SharedDraws(draws, self)
            if not together:
                batches = DealtBatches(batches, rank, size, options.uneven)
        if together:
            batches = SplitBatches(batches, rank, size)
        share = drawing_with(loader, batches)
        if _weights(share) is not None:
            vars(share)["in_order"] = True  # weights come in the order in which batches are drawn
        return share

    def _refuse_global(self, loader: DataLoader, sampler: Any) -> None:
        """Refuse to divide each batch of a sampler that has divided the dataset already."""
        if self._options().batch == "global" and (loader.batch_size or loader.batch_sampler) is not None:
            raise UsageError(
                f'{script_place()} reads a DataLoader whose {type(sampler).__name__} has divided the dataset already, but batch="global" '
                "divides each batch of the whole dataset. Make every rank draw the whole batches: pass num_replicas=1 and rank=0 to that "
                "sampler if it takes them, or write another sampler."
            )

    def _distributed(self, loader: DataLoader, sampler: Any, seed: int, size: int) -> DistributedSampler:
        """Torch's sampler for this rank of ``size``, for a plain loader or for the script's own ``DistributedSampler``."""
        rank = self._rank if size > 1 else 0
        if isinstance(sampler, DistributedSampler):
            return DistributedSampler(sampler.dataset, size, rank, sampler.shuffle, seed, sampler.drop_last)
        return distributed_sampler(loader, rank, size, seed, self._options().uneven)

    def _workers_seed(self, loader: DataLoader) -> int | None:
        """The seed of workers, drawn as torch draws it when an iterator is made; ``None`` for workers that persist."""
        known = self._known.get(loader)
        copy = None if known is None else known.copy
        if kept_iterator(loader) is not None or (copy is not None and kept_iterator(copy) is not None):
            return None
        with self._drawing():
            return int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item())

    def _seed(self, loader: DataLoader, sampler: Any, by_torch: bool) -> int:
        """The seed of the order of a pass, drawn as torch's ``RandomSampler`` draws it, so that all ranks share the order of one process.

        For a sampler of torch that draws by itself, it is the number that it will draw first, which ranks compare. Otherwise it is 0.
        """
        if type(sampler) is DistributedSampler:
            return sampler.seed + sampler.epoch
        if not shuffles(loader) or not (by_torch or (type(sampler) in TORCHS and batches_by_size(loader))):
            return 0
        generator = _generator(loader) or torch.default_generator
        if not by_torch:
            generator = generator.clone_state()
        return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())

    def _drawing(self) -> Any:
        return self._passes.streams.used(random_streams.NONE)

    def _own_streams(self, loader: DataLoader) -> random_streams.Libraries:
        """The libraries that draw from this rank's own streams while samples of a training pass are read.

        Python's is one of them only if this process reads the samples with code that may draw. Torch's own datasets draw nothing.
        """
        draws = loader.num_workers == 0 and not (loader.collate_fn is default_collate and _draws_nothing(loader.dataset))
        return random_streams.ALL if draws else random_streams.TRAINING

    # lengths

    def length(self, loader: DataLoader, original: Callable[[DataLoader], int]) -> int:
        whole = original(loader)
        if get_worker_info() is not None or is_alone() or self._whole is not None:
            return whole
        if opened := self._passes.over(loader):
            return self._share_length(loader, whole) if opened[-1].shared else whole
        if loader in _replicated:
            return whole
        made = self.known(loader).iterated
        iterated = None if made is None else made()
        if iterated is not None and iterated.batches is None:  # list(loader) asks after it has made the iterator
            return whole if self.start(loader, iterated.stack).why_whole else self._share_length(loader, whole)
        asked, dataset = of_script(self._loops.stack(call_stack(sys._getframe(1)))), key_of(loader)
        last = self._iterators.last(loader)
        above = last.shared if last is not None and stands_above(last.stack, asked) else None
        shared = loader in _sharded or (self._lengths.followed(dataset, asked) if above is None else above)
        if shared is None:
            shared = shows_share(
                last_trained=None if last is None else last.shared,
                gradients_on=self._loops.gradients_on(),
                in_eval=self._optimizers.evaluate(),
                shuffled=_reads_anew(loader),
            )
        length = self._share_length(loader, whole) if shared else whole
        if above is None:
            self._lengths.given(loader, asked, length, script_place())
        return length

    def _share_length(self, loader: DataLoader, whole: int) -> int:
        sampler = _sampler(loader)
        divides = loader.batch_size is not None or loader.batch_sampler is not None
        together = divides and self._options().batch == "global"
        if divides_itself(sampler, self._rank, self._size):
            return whole
        if type(sampler) is DistributedSampler:
            divided = batches_by_size(loader) and not together
            ranks = self._size if divided else 1
            whole = len(resampled(loader, DistributedSampler(sampler.dataset, ranks, 0, drop_last=sampler.drop_last)))
            if divided:
                return whole
        if not together and (arranged := getattr(loader.batch_sampler, "for_ranks", None)):
            whole = len(arranged(self._size))
        return whole if together else share_length(loader, whole, self._size, self._options().uneven)

    def _check_lengths(self, loader: DataLoader, opened: Pass, first: bool) -> None:
        """Warn if ``len`` has returned another length for the pass ``opened``: a mean or a schedule may have been computed from it."""
        keeps = (loader.batch_size is not None or loader.batch_sampler is not None) and self._options().batch == "per_rank"
        for length, place in self._lengths.begins(loader, key_of(loader), opened, first):
            try:
                whole = DATALOADER_LENGTH(loader)
            except TypeError:  # a stream without a length
                continue
            now = self._share_length(loader, whole) if opened.shared else whole
            if now == length:
                continue
            self._lengths.reported(place)
            reads = f"has {now} batches on each rank" if opened.shared else f"reads everything on every rank, {now} batches"
            warn(
                f"parwrap: len(loader) was {length} at {place}, but the {'training ' * opened.trains}pass at {opened.place} {reads}. "
                + (
                    f"A schedule built from {length} steps is wrong. Write loader = parwrap.shard(loader) where the loader is made, so "
                    "that its length is that of a share from the beginning."
                    if opened.shared and first
                    else f"A sum over the pass that is divided by {length} is wrong. Ask for len(loader) in the pass or after it."
                )
                + (' Where a library does this, batch="global" (--batch global) keeps every length.' if keeps else "")
            )

    def known(self, loader: DataLoader) -> _Known:
        """What is known about ``loader``, at first nothing. The caller may change it."""
        return self._known.setdefault(loader, _Known())

    def _reading(self, loader: DataLoader) -> Reading:
        known, last = self.known(loader), self._iterators.last(loader)
        if last is None or not last.shared:
            return Reading(None)
        return Reading(known.copy, None if last.exhausted else last.seed, _generator(loader))

    def _resume(self, loader: DataLoader, seed: int | None, drawn: torch.Tensor | None) -> None:
        known, generator, options = self.known(loader), _generator(loader), self._options()
        if seed is not None and (options.batch == "global" or options.uneven == "join"):
            option = "batch='global'" if options.batch == "global" else "uneven='join'"
            raise UsageError(
                f"{script_place()} loads a state that a StatefulDataLoader had in the middle of a pass, but with {option} a pass cannot "
                "continue there: it would read other samples. Save the state at the end of a pass, or use batch='per_rank' with "
                "uneven='pad' or 'drop'."
            )
        known.resumed, known.copy = seed, None
        if drawn is not None and generator is not None:
            generator.set_state(drawn)


FIRST_PASSES, HASHED_EVERY = 3, 32
"""What a loader reads is hashed in its first ``FIRST_PASSES`` passes with gradients on, and later in one that begins at least
``HASHED_EVERY`` backwards after the last hash."""

DATALOADER_LENGTH = DataLoader.__len__
"""Torch's own function, which bypasses the patches."""


def _seeding_workers(loader: DataLoader, seed: int | None) -> AbstractContextManager[None]:
    """Inside the block, new iterators over ``loader`` seed their workers from ``seed``."""
    return nullcontext() if seed is None else attribute(loader, "generator", torch.Generator().manual_seed(seed % 2**63))


class _SharedDraws:
    """Draws each item of a sampler on the shared streams, so that all ranks draw the same.

    Torch's own samplers draw when they begin; any other may draw for every item.
    """

    def __init__(self, indices: Any, loaders: Loaders) -> None:
        self._indices, self._loaders = indices, weakref.ref(loaders)
        sampler = getattr(indices, "sampler", indices)
        self._draws_once = all(type(each).__module__.startswith("torch.utils.data") for each in (indices, sampler))

    def __iter__(self) -> Iterator:
        loaders = self._loaders()
        return iter(self._indices) if loaders is None else drawn_in(loaders._drawing, self._indices, self._draws_once)

    def __len__(self) -> int:
        return len(self._indices)


def key_of(loader: DataLoader) -> Any:
    """What identifies the dataset of a loop: the dataset, or ``loader`` if only that can be referenced weakly, as over a list."""
    try:
        weakref.ref(loader.dataset)
    except TypeError:
        return loader
    return loader.dataset


def _reads_anew(loader: DataLoader) -> bool:
    """Whether ``loader`` reads in another order than that of its dataset."""
    return not isinstance(loader.dataset, IterableDataset) and shuffles(loader)


def _weights(share: DataLoader) -> deque[Batch] | None:
    """The queue that gets the weight of each batch that ``share`` draws; ``None`` if all are 1."""
    if type(share.collate_fn) is CollatePart:
        return deque()
    draws = draws_of(share)
    return draws.weights if isinstance(draws, (DealtBatches, SplitBatches)) else None


def _sampler(loader: DataLoader) -> Any:
    return getattr(loader.batch_sampler, "sampler", loader.sampler)


def _generator(loader: DataLoader) -> torch.Generator | None:
    """The generator that ``loader`` draws its order from, if it is not the default one."""
    generators = getattr(_sampler(loader), "generator", None), loader.generator
    return next((each for each in generators if isinstance(each, torch.Generator) and each.device.type == "cpu"), None)


def _draws_nothing(dataset: Any) -> bool:
    """Whether reading ``dataset`` runs only code of torch, which draws no random numbers."""
    if type(dataset) is TensorDataset or isinstance(dataset, (torch.Tensor, list, tuple, range)):
        return True
    if type(dataset) is Subset:
        return _draws_nothing(dataset.dataset)
    return type(dataset) is ConcatDataset and all(map(_draws_nothing, dataset.datasets))


def _endless_from(loader: DataLoader) -> int:
    """How many samples a pass reads at most if its sampler ends; 0 if its sampler has a length, or its dataset has none."""
    ends = isinstance(loader.dataset, IterableDataset) or hasattr(draws_of(loader), "__len__")
    return 0 if ends else length_hint(loader.dataset)


def _batches(batches: Iterator | None) -> int:
    """The number of batches that torch's iterator yields; 0 if it is unknown."""
    try:
        return length_hint(batches, 0)
    except Exception:  # the script's sampler raises it
        return 0


def _samples(loader: DataLoader) -> int | None:
    """How many samples one process reads in a pass; ``None`` if unknown, as without a batch size, where items may be batches."""
    return (length_hint(_sampler(loader)) or None) if isinstance(loader.batch_sampler, BatchSampler) else None
