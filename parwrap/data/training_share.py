"""A rank's share of one training pass: a shallow copy of the loader that draws this rank's batches.

``loaders.py`` decides whether a pass trains at all, ``dataset_agreement.py`` checks that ranks split the same data, ``samplers.py``
assigns the indices, and ``resumed_pass.py`` leaves out those that an earlier run has trained on.
"""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, IterDataPipe
from torch.utils.data.distributed import DistributedSampler

from parwrap.coordination.call_site import location, warn
from parwrap.data.dataset_agreement import Agreement, SameDraws
from parwrap.data.dataset_summaries import length_of
from parwrap.data.evaluation_blocks import Counted
from parwrap.data.iterables import part_of
from parwrap.data.loader_position import EPOCH, LENGTH, RANKS, Plan, Position
from parwrap.data.own_sampler import OwnSamplers
from parwrap.data.passes import SharedDraws
from parwrap.data.resumed_pass import Resumed
from parwrap.data.samplers import (
    DealtBatches,
    SplitBatches,
    arranged,
    distributed_sampler,
    is_plain,
    refuse_nothing,
    samples_in,
    share_length,
    shuffles,
    with_indices,
    with_others,
)
from parwrap.data.sharing_options import OwnPart, Sharing, TrainingData, replicated
from parwrap.data.unread import unread_of
from parwrap.group.group import Group
from parwrap.loop.random_streams import RandomStreams

__all__ = ["TrainingShares"]

END_OF_STREAM = "the end of a pass over an IterableDataset"
END_OF_SHARE = "the end of a pass over a DataLoader without a backward pass"

ANOTHER_LOADER = 1_000_003
"""The distance between the seeds of two loaders, so that they never coincide in a later epoch: zipped loaders must not pair a sample with
itself."""


@dataclass
class _Shared:
    """The state of one loader that has been split.

    Attributes:
        position: the position of its training passes.
        seeds: the seed of the split, for each length that the dataset has had.
        draws: whether the samplers of all ranks draw the same.
        lasting: the copy with persistent workers, which is kept from pass to pass.
        draws_of_lasting: the draws of its custom sampler, if any.
    """

    position: Position
    seeds: dict[int, int] = field(default_factory=dict)
    draws: dict[str, bool] = field(default_factory=dict)
    lasting: DataLoader | None = None
    draws_of_lasting: SharedDraws | None = None


class TrainingShares:
    """Makes this rank's training share of a loader.

    Args:
        group: the ranks; ``None`` for a single rank.
        streams: the random streams; samplers must draw from the shared ones.
        sharing: a function that returns the present options.
        began: a function, called at the first training pass.
    """

    def __init__(
        self, group: Group | None, streams: RandomStreams, sharing: Callable[[], Sharing], began: Callable[[TrainingData], None]
    ) -> None:
        self._group, self._streams, self._sharing, self._began = group, streams, sharing, began
        self._rank, self._size = (group.world.rank, group.world.size) if group else (0, 1)
        self._agreement = Agreement(group) if group else None
        if group:
            for kind in (END_OF_STREAM, END_OF_SHARE):
                group.coordinator.answer(kind, lambda detail, present: None)
        self._own = OwnSamplers(self._agreement, self._rank, self._size)
        self._loaders: weakref.WeakKeyDictionary[DataLoader, _Shared] = weakref.WeakKeyDictionary()
        self._sharded = 0
        self._seedings = streams.seedings
        self._warned = self._warned_of_units = self._closed = False

    def close(self) -> None:
        """Make passes that outlive the session no longer wait for other ranks."""
        self._closed = True

    def batches(self, loader: DataLoader, original: Callable[[DataLoader], Iterator], position: Position) -> tuple[Iterator, Any]:
        """This rank's batches of a training pass, and their weights if each is a part of a larger batch.

        If the loader was set to a ``position``, these are the batches after it.
        """
        resumed = position.begin(loader, self._group)
        shared = self._loaders.setdefault(loader, _Shared(position))
        try:
            if resumed:
                return self._resume(loader, shared, original, Resumed(resumed))
            if isinstance(loader.dataset, IterableDataset):
                return self._stream(loader, shared, original)
            return self._by_index(loader, shared, original)
        except BaseException:
            position.end()
            raise

    def _by_index(self, loader: DataLoader, shared: _Shared, original: Callable) -> tuple[Iterator, Any]:
        """The batches of a dataset that is read by index."""
        position = shared.position
        if shared.lasting is not None:
            position.draws = shared.draws_of_lasting
            return self._begun(shared.lasting, loader, original, position)
        seeded_before = _workers_are_older(loader, position)
        seed = None if self._whole(loader) and not seeded_before else self._workers_seed(loader)
        if seeded_before:
            position.set_back(loader)
        shard = self._shard(loader, shared)
        if seed is not None:
            shard.generator = torch.Generator().manual_seed(seed)
        if loader.persistent_workers:
            shared.lasting, shared.draws_of_lasting = shard, position.draws
        return self._begun(shard, loader, original, position)

    def _begun(
        self, shard: DataLoader, loader: DataLoader, original: Callable, position: Position, resumes: bool = False
    ) -> tuple[Iterator, Any]:
        if self._group and not (resumes or self._whole(loader) or self.shares_out_itself(loader)):
            position.unread = unread_of(shard)
        if isinstance(shard.sampler, DistributedSampler) and not isinstance(loader.sampler, DistributedSampler):
            shard.sampler.set_epoch(position.epoch)
        with self._streams.shared() if self._whole(loader) else nullcontext():
            batches = original(shard)
        drawn = shard.sampler if shard.batch_sampler is None else shard.batch_sampler
        return batches, drawn.weights if isinstance(drawn, (DealtBatches, SplitBatches)) else None

    def _shard(self, loader: DataLoader, shared: _Shared, resumed: Resumed | None = None) -> DataLoader:
        """A copy for one pass. Another pass over the same loader may be open, and options and dataset may have changed."""
        if not self._whole(loader):
            self._share_seed(loader, shared)
            if isinstance(loader.sampler, DistributedSampler):
                self._own.note(loader.sampler)
            if self.shares_out_itself(loader):
                return self._own.shard(loader, resumed.done if resumed else 0)
            if self._sharing().uneven == "drop" and not self._splits(loader):
                refuse_nothing(loader, self._size)
        kind, size = shared.position.kind, loader.batch_size or 1
        if kind == "batches":
            return with_indices(loader, self._dealt(loader, self._drawn(loader, shared, resumed)))
        if kind == "samples" and self._by_sample(loader):
            sampler = self._samples(loader, shared, resumed, self._rank, self._size)
            indices = sampler if loader.batch_sampler is None else BatchSampler(sampler, size, loader.drop_last)
            return with_indices(loader, indices, sampler=sampler)
        order = self._samples(loader, shared, resumed, 0, 1) if kind == "samples" else self._drawn(loader, shared, resumed, loader.sampler)
        if loader.batch_sampler is None:
            return with_indices(loader, self._dealt(loader, order))
        if self._joins(loader):
            # the batches of all ranks together, as a single process with a batch of that size would draw them
            together = BatchSampler(order, size * self._size, loader.drop_last)
            return with_indices(loader, SplitBatches(together, self._rank, self._size))
        return with_indices(loader, self._dealt(loader, BatchSampler(order, size, loader.drop_last)))

    def _samples(self, loader: DataLoader, shared: _Shared, resumed: Resumed | None, rank: int, size: int) -> Any:
        """Samples in the order of ``DistributedSampler``."""
        uneven = self._sharing().uneven
        if resumed:
            return resumed.samples(loader, rank, size, uneven)
        return distributed_sampler(loader, rank, size, shared.seeds.get(len(loader.dataset), 0), uneven)  # type: ignore[arg-type]

    def _drawn(self, loader: DataLoader, shared: _Shared, resumed: Resumed | None, sampler: Any = None) -> Any:
        """The draws of ``sampler``, or of the loader's own, the same on all ranks."""
        source = sampler or (loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
        draws = SharedDraws(arranged(source, 1 if self._splits(loader) else self._size), self._streams)
        shared.position.draws = draws
        if resumed:
            return resumed.draws(draws, self._size)
        if self._group is None or self._whole(loader):
            return draws
        return SameDraws(draws, self._group, shared.draws, type(loader.sampler).__name__)

    def _dealt(self, loader: DataLoader, batches: Any) -> Any:
        """This rank's part of ``batches`` that are the same on all ranks."""
        if self._whole(loader):
            return batches
        if self._splits(loader):
            return SplitBatches(batches, self._rank, self._size)
        return DealtBatches(batches, self._rank, self._size, self._sharing().uneven)

    def _share_seed(self, loader: DataLoader, shared: _Shared) -> None:
        """Agree with the other ranks on the data to split and on the seed, unless a loaded position has a seed."""
        position, samples = shared.position, length_of(loader.dataset)
        changed = self._agreement.changed(loader) if self._agreement else []
        given, position.given = position.given, None
        if self._seedings != self._streams.seedings:
            self._seedings, self._sharded = self._streams.seedings, 0
        if given:
            self._sharded = max(self._sharded, given[1])
        new = samples not in shared.seeds
        seed = given[0] if given else self._seed(loader) if new else shared.seeds[samples]
        if self._agreement and (new or changed):
            seed = self._agreement.agree(loader, changed, seed)
        if new:
            self._announce(loader, samples if samples >= 0 else None)
            position.seed = position.seed if given else (seed, self._sharded)
        shared.seeds[samples] = seed

    def _seed(self, loader: DataLoader) -> int:
        """The seed of one more loader since the script has seeded."""
        generator = getattr(loader.sampler, "generator", None) or loader.generator
        with self._streams.shared():
            seed = self._streams.seed() + ANOTHER_LOADER * self._sharded if generator is None else generator.initial_seed()
        self._sharded += 1
        return seed % 2**62

    def _workers_seed(self, loader: DataLoader) -> int:
        """The seed for this rank's workers in a pass: augmentation must differ by rank, even if the user's generator is the same on all."""
        with self._streams.shared():
            # drawn as the loader's own iterator does in a single process, so that the shared streams stay where they would be
            drawn = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item())
        return (drawn + (0 if self._whole(loader) else self._rank)) % 2**63

    def _stream(self, loader: DataLoader, shared: _Shared, original: Callable[[DataLoader], Iterator]) -> tuple[Iterator, Any]:
        if self.keeps():
            return original(loader), None
        if loader in replicated or isinstance(loader.dataset, IterDataPipe):
            with self._streams.shared():
                whole = SharedDraws(original(loader), self._streams)
            if loader in replicated:
                return iter(whole), None
            self._announce(loader, None)
            return iter(DealtBatches(whole, self._rank, self._size)), None
        return self._part_of_stream(loader, shared, original)

    def _part_of_stream(self, loader: DataLoader, shared: _Shared, original: Callable[[DataLoader], Iterator]) -> tuple[Iterator, Any]:
        self._announce(loader, None)
        weighs = self._sharing().weighs_streams
        part = shared.lasting
        if part is None:
            part = self._part(loader, counted=weighs and loader.batch_sampler is not None)
        if loader.persistent_workers:
            shared.lasting = part
        with self._streams.shared():
            batches = original(part)
        weights: deque[float] | None = deque() if weighs else None
        samples = (loader.batch_size or 1) / (self._size if self._splits(loader) else 1)
        counted = isinstance(part.collate_fn, Counted)

        def drawn() -> Iterator:
            nothing: Any = object()
            while True:
                # a loader that shards itself may draw more often on one rank than on another
                with nullcontext() if getattr(part.dataset, "shards_itself", False) else self._streams.shared():
                    batch = next(batches, nothing)
                if batch is nothing:
                    break
                count, batch = batch if counted else (None, batch)
                if weights is not None:
                    weights.append((samples_in(batch) if count is None else count) / samples)
                yield batch
            if self._group and threading.current_thread() is threading.main_thread():
                self._group.synchronize(END_OF_STREAM)  # parts may differ in length; a rank that finishes answers the others

        return drawn(), weights

    def _part(self, loader: DataLoader, counted: bool) -> DataLoader:
        """A copy of a stream's loader that reads this rank's part. If ``counted``, each batch comes with its number of samples."""
        others = part_of(loader, self._rank, self._size, self._sharing())
        return with_others(loader, **others, **({"collate_fn": Counted(loader.collate_fn)} if counted else {}))

    def _resume(self, loader: DataLoader, shared: _Shared, original: Callable, resumed: Resumed) -> tuple[Iterator, Any]:
        """The batches of a pass that continues from the middle."""
        position = shared.position
        if isinstance(loader.dataset, IterableDataset):
            batches, weights = self._stream(loader, shared, original)
            for _ in itertools.islice(batches, resumed.done):
                if weights is not None:
                    weights.popleft()
            position.went_on(loader, resumed.state)
            return batches, weights
        seed = self._workers_seed(loader) + ANOTHER_LOADER * resumed.done  # not the seeds of the beginning of the pass
        if _workers_are_older(loader, position):
            position.set_back(loader)
        shard = self._shard(loader, shared, resumed)
        shard.generator = torch.Generator().manual_seed(seed % 2**63)
        position.went_on(loader, resumed.state)
        return self._begun(shard, loader, original, position, resumes=True)

    def rest(self, loader: DataLoader, original: Callable[[DataLoader], Iterator], indices: list) -> Iterator:
        """The batches of ``indices``, which this rank has not read yet in a pass that does not train."""
        # it must not advance any stream: in a single process such a pass does not exist
        own = torch.Generator().manual_seed(ANOTHER_LOADER * (self._rank + 1))
        return original(with_indices(loader, indices, generator=own, persistent_workers=False))

    def all_look(self, trains: bool) -> bool:
        """Wait for the other ranks at the end of a share without training. Returns whether no rank ``trains`` in this pass."""
        if self._group is None or self._closed or threading.current_thread() is not threading.main_thread():
            return False  # a thread draws ahead
        present = self._group.coordinator.wait(END_OF_SHARE, unless_begun=True)
        return self._rank in present and not any(self._group.share(END_OF_SHARE, trains, present).values())

    def take_back(self, loader: DataLoader) -> None:
        """Record that ``loader`` has not been trained on yet: the next loader that is trained on gets its seed."""
        shared = self._loaders[loader]
        if shared.position.seed and shared.position.seed[1] == self._sharded and len(shared.seeds) == 1 and shared.lasting is None:
            self._sharded -= 1
            shared.seeds.clear()
            shared.position.seed = None

    def plan(self, loader: DataLoader, kind: str | None = None) -> Plan:
        """How a training pass over ``loader`` is read, optionally from another ``kind`` of position than the loader's own."""
        sharing, size = self._sharing(), loader.batch_size
        of = {"batch_size": size, "sharing": f"batch={sharing.batch}, uneven={sharing.uneven}"} if self._size > 1 else {"batch_size": size}
        if isinstance(loader.dataset, IterableDataset):
            return Plan("stream", 1, ("stream",), {RANKS: self._size, "number of workers": loader.num_workers, **of})
        facts = {LENGTH: length_of(loader.dataset), "order": "shuffled" if shuffles(loader) else "as it is"}
        if hasattr(loader.batch_sampler, "for_ranks"):
            facts[RANKS] = self._size  # its order depends on the number of ranks
        if self.shares_out_itself(loader) and loader not in replicated:
            sampler: Any = loader.sampler
            return Plan("own", 1, ("own",), facts | of | {RANKS: self._size, "sampler's seed": sampler.seed, EPOCH: sampler.epoch})
        plain, whole = is_plain(loader), self._whole(loader) or self._splits(loader)
        kind = kind or ("samples" if self._by_sample(loader) else "draws" if self._joins(loader) else "batches")
        per_step = (1 if whole else self._size) * (1 if kind == "batches" else size or 1)
        return Plan(kind, per_step, ("samples", "batches", "draws") if plain else ("batches",), facts)

    def agree(self, loader: DataLoader) -> None:
        """Make all ranks hold the same samples behind ``loader``, which is not split here."""
        if self._agreement and (changed := self._agreement.changed(loader)):
            self._agreement.agree(loader, changed, 0)

    def take_first(self, loader: DataLoader) -> None:
        """Make all ranks read the same samples of ``loader``, even inside a training pass in which each rank draws its own."""
        if self._agreement and not self._closed and threading.current_thread() is threading.main_thread():
            self._agreement.take_first(loader)

    def length(self, loader: DataLoader, whole: int) -> int:
        """How many of a training pass's ``whole`` batches this rank gets."""
        if self._whole(loader) or self.shares_out_itself(loader) or self._splits(loader):
            return whole
        return share_length(loader, whole, self._size, self._sharing().uneven)

    def shares_out_itself(self, loader: DataLoader) -> bool:
        """Whether the user's own sampler divides ``loader`` among the present number of ranks."""
        return self._own.shares_out(loader)

    def _splits(self, loader: DataLoader) -> bool:
        batches = loader.batch_sampler is not None or isinstance(loader.sampler, BatchSampler)
        return self._sharing().batch == "global" and batches and not isinstance(loader.dataset, IterDataPipe)

    def keeps(self) -> bool:
        """Whether nothing has to be split, because a single rank reads the loader's own batches."""
        return self._group is None and self._sharing().batch != "global"

    def reads_all(self, loader: DataLoader) -> bool:
        """Whether this rank's share is the whole loader, or everything that belongs to this rank."""
        return self._size == 1 or self._whole(loader)

    def _whole(self, loader: DataLoader) -> bool:
        """Whether every rank has all batches."""
        return self.keeps() or loader in replicated or isinstance(loader.dataset, OwnPart)

    def _joins(self, loader: DataLoader) -> bool:
        """Whether the ranks take samples together, weighted by the number of samples of a rank."""
        whole = self._whole(loader) or self._splits(loader) or loader.batch_sampler is None
        return self._sharing().uneven == "join" and not whole and is_plain(loader)

    def _by_sample(self, loader: DataLoader) -> bool:
        """Whether samples are dealt out one by one, as ``DistributedSampler`` does."""
        return is_plain(loader) and not (self._whole(loader) or self._splits(loader) or self._sharing().uneven == "join")

    def _warn_of_items(self) -> None:
        if not self._warned:
            self._warned = True
            warn(
                f'parwrap: batch="global" cannot split the items of a DataLoader with batch_size=None ({location()}): the ranks take '
                f"turns to read whole items, so a step covers {self._size} of them. Let the loader make the batches, with batch_size or "
                'sampler=BatchSampler(...), or use batch="per_rank". This is shown once.'
            )

    def _warn_of_units(self, sampler: Any) -> None:
        """Warn that a batch of the script's own sampler may be a unit that must not be split."""
        if self._size > 1 and type(sampler) is not BatchSampler and not hasattr(sampler, "for_ranks") and not self._warned_of_units:
            self._warned_of_units = True
            warn(
                f'parwrap: batch="global" cuts each batch of a {type(sampler).__name__} into {self._size} parts, one for each rank '
                f"({location()}). This is exact for a loss that is a mean over samples. If a batch must stay whole, such as an episode "
                'in few-shot learning, use batch="per_rank". This is shown once.'
            )

    def _announce(self, loader: DataLoader, samples: int | None) -> None:
        size = loader.batch_size
        if size is None and loader.batch_sampler is not None and self._splits(loader):
            self._warn_of_units(loader.batch_sampler)
        if loader.batch_sampler is None and self._sharing().batch == "global" and self._group and not self._splits(loader):
            self._warn_of_items()
        if size is None:
            self._began(TrainingData(samples, None, None))
        elif self._splits(loader) and not self.shares_out_itself(loader):
            self._began(TrainingData(samples, math.ceil(size / self._size), size))
        else:
            self._began(TrainingData(samples, size, size * self._size))


def _workers_are_older(loader: DataLoader, position: Position) -> bool:
    """Whether the run that saved the position drew the seed of the persistent workers, in its first pass."""
    return loader.persistent_workers and position.epoch > 0
