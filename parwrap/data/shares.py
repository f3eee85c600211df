"""A rank's share of one training pass: a shallow copy of the loader that draws this rank's batches.

Whether a pass trains at all is decided by ``loaders.py``, that ranks share out the same data by ``agreement.py``, and which
indices are whose by ``sharding.py``.
"""

from __future__ import annotations

import copy
import itertools
import math
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from parwrap.data.agreement import Agreement, SameDraws
from parwrap.data.passes import SharedDraws
from parwrap.data.position import EPOCH, LENGTH, LOADED, RANKS, Plan, Position, digest
from parwrap.data.resuming import RestOfBatches, RestOfSamples, Skipping
from parwrap.data.sharding import DealtBatches, SplitBatches, distributed_sampler, is_plain, share_length, shuffles, with_indices
from parwrap.errors import UsageError
from parwrap.group import Group
from parwrap.streams import Streams

__all__ = ["Shares", "TrainingData"]

ANOTHER_LOADER = 1_000_003
"""Apart by this, the seeds of two loaders never meet in a later epoch; zipped loaders must not pair a sample with itself."""


@dataclass(frozen=True)
class TrainingData:
    """What the first training pass is over, for the line that says so.

    Attributes:
        samples: in the whole dataset; ``None`` where it has no length.
        batch_size: per rank; ``None`` where batches are of no fixed size.
        global_batch: of all ranks together.
    """

    samples: int | None
    batch_size: int | None
    global_batch: int | None


@dataclass
class _Shared:
    """What is known of one loader that has been shared out.

    Attributes:
        position: where its training passes are.
        seeds: the seed to share out by, for each length that the dataset has had.
        draws: whether the ranks' samplers were found to draw the same.
        ranks_differ: whether the ranks' own ``DistributedSampler`` objects share out.
        lasting: the copy whose persistent workers stay from pass to pass.
        draws_of_lasting: what its sampler draws, if it has one of its own.
    """

    position: Position
    seeds: dict[int, int] = field(default_factory=dict)
    draws: dict[str, bool] = field(default_factory=dict)
    ranks_differ: bool | None = None
    lasting: DataLoader | None = None
    draws_of_lasting: SharedDraws | None = None


class Shares:
    """Makes this rank's share of a loader.

    Args:
        group: the ranks to share with; ``None`` for a single rank.
        streams: the random streams; what samplers draw must be drawn from the shared ones.
        split: whether each batch is split among the ranks (``batch="global"``) rather than every rank taking batches of
            its own.
        began: called at the first training pass.
    """

    def __init__(self, group: Group | None, streams: Streams, split: Callable[[], bool], began: Callable[[TrainingData], None]) -> None:
        self._group, self._streams, self._split, self._began = group, streams, split, began
        self._rank, self._size = (group.world.rank, group.world.size) if group else (0, 1)
        self._agreement = Agreement(group) if group else None
        if group:
            group.meetings.answer(LOADED, lambda detail, present: None)  # who has left goes on from nowhere
        self._loaders: weakref.WeakKeyDictionary[DataLoader, _Shared] = weakref.WeakKeyDictionary()
        self._sharded = 0
        self._noted = False

    def batches(self, loader: DataLoader, original: Callable[[DataLoader], Iterator], position: Position) -> tuple[Iterator, Any]:
        """This rank's batches of a training pass, and the weights of them if each is a part of a larger batch.

        Where the loader is put at ``position``, the pass has what comes after it.
        """
        rest = position.begin(loader, self._group)
        batches, weights = self._shared_out(loader, original, position, rest)
        if rest and rest["kind"] == "stream":
            for _ in itertools.islice(batches, rest["done"]):
                if weights is not None:
                    weights.popleft()
            position.went_on(loader, rest)
        return batches, weights

    def _shared_out(self, loader: DataLoader, original: Callable, position: Position, rest: dict[str, Any] | None) -> tuple[Iterator, Any]:
        if isinstance(loader.dataset, IterableDataset):
            self._announce(loader, None)
            if self._keeps():
                return original(loader), None
            with self._streams.shared():
                stream = SharedDraws(original(loader), self._streams)
            return iter(DealtBatches(stream, self._rank, self._size)), None
        shared = self._loaders.setdefault(loader, _Shared(position))
        if shared.lasting and not rest:
            position.draws = shared.draws_of_lasting
            return self._begun(shared.lasting, loader, original, position)
        lasting = loader.persistent_workers and position.epoch > 0  # their seed was drawn for the first pass, in the run before
        seed = None if self._keeps() and not rest and not lasting else self._workers_seed(loader, rest)
        if lasting:
            position.set_back(loader)
        shard = self._shard(loader, shared, rest)
        if seed is not None:
            shard.generator = torch.Generator().manual_seed(seed)
        if rest:
            position.went_on(loader, rest)
        elif loader.persistent_workers:
            shared.lasting, shared.draws_of_lasting = shard, position.draws
        return self._begun(shard, loader, original, position)

    def _begun(self, shard: DataLoader, loader: DataLoader, original: Callable, position: Position) -> tuple[Iterator, Any]:
        if isinstance(shard.sampler, DistributedSampler) and not isinstance(loader.sampler, DistributedSampler):
            shard.sampler.set_epoch(position.epoch)
        return original(shard), getattr(shard.batch_sampler, "weights", None)

    def _workers_seed(self, loader: DataLoader, rest: dict[str, Any] | None) -> int:
        """What this rank's workers are seeded from in a pass.

        Augmentation must differ by rank, also where the user's generator is the same on all, and not be that of the pass's beginning
        where it goes on from the middle.
        """
        with self._streams.shared():
            # what the loader's own iterator draws in a single process, so that the shared streams stay where they would be
            drawn = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item())
        return (drawn + self._rank + (ANOTHER_LOADER * rest["done"] if rest else 0)) % 2**63

    def plan(self, loader: DataLoader, kind: str | None = None) -> Plan:
        """How a training pass over ``loader`` is read, and from what ``kind`` of position, if that is not the loader's own."""
        if isinstance(loader.dataset, IterableDataset):
            return Plan("stream", 1, ("stream",), {RANKS: self._size, "number of workers": loader.num_workers})
        facts = {LENGTH: _length(loader), "order": "shuffled" if shuffles(loader) else "as it is"}
        if self.shares_out_itself(loader):
            sampler: Any = loader.sampler
            return Plan("own", 1, ("own",), facts | {RANKS: self._size, "sampler's seed": sampler.seed, EPOCH: sampler.epoch})
        whole, plain = self._keeps() or self._splits(loader), is_plain(loader)
        kind = kind or ("samples" if plain and not whole else "batches")
        ranks, size = 1 if whole else self._size, loader.batch_size or 1
        return Plan(kind, ranks if kind == "batches" else ranks * size, ("samples", "batches") if plain else ("batches",), facts)

    def length(self, loader: DataLoader, whole: int) -> int:
        """How many of a training pass's ``whole`` batches this rank gets."""
        return whole if self.shares_out_itself(loader) or self._splits(loader) else share_length(loader, whole, self._size)

    def shares_out_itself(self, loader: DataLoader) -> bool:
        """Whether the user's own sampler shares out ``loader`` to as many ranks as there are."""
        return isinstance(loader.sampler, DistributedSampler) and loader.sampler.num_replicas == self._size > 1

    def _splits(self, loader: DataLoader) -> bool:
        return self._split() and loader.batch_sampler is not None and not isinstance(loader.dataset, IterableDataset)

    def _keeps(self) -> bool:
        """Whether there is nothing to share out: a single rank has the loader's own batches."""
        return self._group is None and not self._split()

    def _shard(self, loader: DataLoader, shared: _Shared, rest: dict[str, Any] | None) -> DataLoader:
        """A copy for one pass: another pass over the same loader may be open, and options and dataset may have changed since."""
        if rest is None and self._keeps():
            return with_indices(loader, self._drawn(loader, shared, None))
        samples = len(loader.dataset)  # type: ignore[arg-type]
        self._share_seed(loader, shared, samples)
        if isinstance(loader.sampler, DistributedSampler):
            self._note(loader.sampler)
        if self.shares_out_itself(loader):
            return self._own_shard(loader, shared, rest)
        batches = loader.batch_sampler
        if rest and rest["kind"] == "samples":
            return self._rest_of_samples(loader, shared.seeds[samples], rest)
        if self._splits(loader):
            return with_indices(loader, SplitBatches(self._drawn(loader, shared, rest), self._rank, self._size))
        if is_plain(loader) and not rest:
            sampler = distributed_sampler(loader, self._rank, self._size, shared.seeds[samples])
            indices = sampler if batches is None else BatchSampler(sampler, loader.batch_size or 1, loader.drop_last)
            return with_indices(loader, indices, sampler=sampler)
        return with_indices(loader, DealtBatches(self._drawn(loader, shared, rest), self._rank, self._size))

    def _rest_of_samples(self, loader: DataLoader, seed: int, rest: dict[str, Any]) -> DataLoader:
        """What comes after the first samples in the order that ``DistributedSampler`` has for all ranks together."""
        order = distributed_sampler(loader, 0, 1, seed)
        order.set_epoch(rest["epoch"])
        ranks = (0, 1) if self._splits(loader) else (self._rank, self._size)
        indices = RestOfSamples(list(order), rest["done"], *ranks)
        if loader.batch_sampler is None:
            return with_indices(loader, indices)
        batches = BatchSampler(indices, loader.batch_size or 1, loader.drop_last)
        return with_indices(loader, SplitBatches(batches, self._rank, self._size) if self._splits(loader) else batches, sampler=indices)

    def _share_seed(self, loader: DataLoader, shared: _Shared, samples: int) -> None:
        """Agree on what is shared out, and by which seed; a position that was loaded has one."""
        position = shared.position
        changed = self._agreement.changed(loader) if self._agreement else []
        given, position.given = position.given, None
        if given:
            self._sharded = max(self._sharded, given[1])
        new = samples not in shared.seeds
        seed = given[0] if given else self._seed(loader) if new else shared.seeds[samples]
        if self._agreement and (new or changed):
            seed = self._agreement.agree(loader, changed, seed)
        if new:
            self._announce(loader, samples)
            position.seed = position.seed if given else (seed, self._sharded)
        shared.seeds[samples] = seed

    def _seed(self, loader: DataLoader) -> int:
        """The seed of one more loader."""
        generator = getattr(loader.sampler, "generator", None) or loader.generator
        with self._streams.shared():
            seed = torch.initial_seed() + ANOTHER_LOADER * self._sharded if generator is None else generator.initial_seed()
        self._sharded += 1
        return seed % 2**62

    def _drawn(self, loader: DataLoader, shared: _Shared, rest: dict[str, Any] | None) -> Any:
        """What the loader's own sampler draws, the same on all ranks; of that the ``rest``."""
        draws = SharedDraws(loader.sampler if loader.batch_sampler is None else loader.batch_sampler, self._streams)
        shared.position.draws = draws
        if rest:
            draws.check = rest["drawn"], partial(_check_drawn, rest)  # which shows too that all ranks draw the same
            return RestOfBatches(draws, rest["done"], rest["drawn"], self._size)
        return SameDraws(draws, self._group, shared.draws, type(loader.sampler).__name__) if self._group else draws

    def _own_shard(self, loader: DataLoader, shared: _Shared, rest: dict[str, Any] | None) -> DataLoader:
        """A copy that draws from the user's own ``DistributedSampler``, if need be as this rank."""
        sampler: Any = loader.sampler
        if shared.ranks_differ is None and self._agreement:
            shared.ranks_differ = self._agreement.own_sampler(sampler)
            if not shared.ranks_differ:
                warnings.warn(
                    f"parwrap: a DataLoader's own DistributedSampler was made with rank={sampler.rank} on more than one rank, so that they "
                    "would train on the same share; each gets its own. Leave out num_replicas= and rank=, or use no DistributedSampler.",
                    stacklevel=2,
                )
        if not shared.ranks_differ:
            sampler = copy.copy(sampler)  # each time anew: set_epoch is the user's
            sampler.rank = self._rank
        batches: Any = loader.batch_sampler
        if batches is not None and sampler is not loader.sampler:
            batches = copy.copy(batches)
            batches.sampler = sampler
        drawn = sampler if batches is None else batches
        others = {} if batches is None else {"sampler": sampler}
        return with_indices(loader, Skipping(drawn, rest["done"]) if rest else drawn, **others)

    def _note(self, sampler: DistributedSampler) -> None:
        if self._noted or self._size == 1:
            return
        self._noted = True
        if self._rank == 0:
            replicas = sampler.num_replicas
            what = "it is kept" if replicas == self._size else f"what it draws is shared out among {self._size} ranks"
            made_for = "1 replica" if replicas == 1 else f"{replicas} replicas"
            print(f"parwrap: a DataLoader has a DistributedSampler of its own, for {made_for}: {what}.", file=sys.stderr)

    def _announce(self, loader: DataLoader, samples: int | None) -> None:
        size = loader.batch_size
        if size is None:
            self._began(TrainingData(samples, None, None))
        elif self._splits(loader) and not self.shares_out_itself(loader):
            self._began(TrainingData(samples, math.ceil(size / self._size), size))
        else:
            self._began(TrainingData(samples, size, size * self._size))


def _length(loader: DataLoader) -> int | None:
    try:
        return len(loader.dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def _check_drawn(rest: dict[str, Any], drawn: Any) -> None:
    """Raise if a sampler draws something else than it did before the state of ``rest`` was taken."""
    if drawn is None or digest(drawn) != rest["last"]:
        raise UsageError(
            f"a DataLoader's sampler does not draw again what it drew before its state was taken: number {rest['drawn']} of the pass is "
            "another, so there is no place to go on from. Its batch_size, weights and indices must be what they were, and it must draw "
            "from torch, np.random or random while nothing else does, or from a generator that is an attribute of it."
        )
