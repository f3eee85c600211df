"""A rank's share of one training pass: a shallow copy of the loader that draws this rank's batches.

Whether a pass trains at all is decided by ``loaders.py``, that ranks share out the same data by ``agreement.py``, and which
indices are whose by ``sharding.py``.
"""

from __future__ import annotations

import copy
import math
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, IterDataPipe
from torch.utils.data.distributed import DistributedSampler

from parwrap.data.agreement import Agreement, SameDraws
from parwrap.data.iterables import Pick, part_of
from parwrap.data.passes import SharedDraws
from parwrap.data.sharding import (
    DealtBatches,
    SplitBatches,
    arranged,
    distributed_sampler,
    is_plain,
    samples_in,
    share_length,
    with_indices,
    with_others,
)
from parwrap.errors import UsageError
from parwrap.group import Group
from parwrap.streams import Streams

__all__ = ["Shares", "Sharing", "TrainingData", "replicated"]

END_OF_STREAM = "the end of a pass over an IterableDataset"

replicated: weakref.WeakSet[DataLoader] = weakref.WeakSet()
"""Loaders of which every rank is to see all; what users say holds in every scope."""

ANOTHER_LOADER = 1_000_003
"""Apart by this, the seeds of two loaders never meet in a later epoch; zipped loaders must not pair a sample with itself."""


@dataclass(frozen=True)
class Sharing:
    """How training data is to be shared out, in the words of :class:`parwrap.distributed`.

    Attributes:
        batch: ``"per_rank"`` or ``"global"``.
        uneven: ``"pad"``, ``"drop"`` or ``"join"``.
        loss: ``"mean"`` or ``"sum"``.
    """

    batch: str = "per_rank"
    uneven: str = "pad"
    loss: str = "mean"

    @property
    def weighs_streams(self) -> bool:
        """Whether the batches of a stream count by their samples."""
        return self.loss == "mean" and (self.batch == "global" or self.uneven == "join")

    def loss_factor(self, weight: float, size: int) -> float:
        """What the loss of a batch is to be multiplied by, beside its ``weight``: a sum weighs by samples as it is."""
        if self.loss == "mean" or not weight:
            return 1.0
        return (size if self.batch == "global" else 1) / weight


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
        epoch: the number of training passes.
        seeds: the seed to share out by, for each length that the dataset has had.
        draws: whether the ranks' samplers were found to draw the same.
        ranks_differ: whether the ranks' own ``DistributedSampler`` objects share out.
        lasting: the copy whose persistent workers stay from pass to pass.
    """

    epoch: int = 0
    seeds: dict[int, int] = field(default_factory=dict)
    draws: dict[str, bool] = field(default_factory=dict)
    ranks_differ: bool | None = None
    lasting: DataLoader | None = None


class Shares:
    """Makes this rank's share of a loader.

    Args:
        group: the ranks to share with; ``None`` for a single rank.
        streams: the random streams; what samplers draw must be drawn from the shared ones.
        sharing: gives how to share out now.
        began: called at the first training pass.
    """

    def __init__(
        self, group: Group | None, streams: Streams, sharing: Callable[[], Sharing], began: Callable[[TrainingData], None]
    ) -> None:
        self._group, self._streams, self._sharing, self._began = group, streams, sharing, began
        self._rank, self._size = (group.world.rank, group.world.size) if group else (0, 1)
        self._agreement = Agreement(group) if group else None
        if group:
            group.meetings.answer(END_OF_STREAM, lambda detail, present: None)
        self._loaders: weakref.WeakKeyDictionary[DataLoader, _Shared] = weakref.WeakKeyDictionary()
        self._sharded = 0
        self._noted = False

    def batches(self, loader: DataLoader, original: Callable[[DataLoader], Iterator]) -> tuple[Iterator, Any]:
        """This rank's batches of a training pass, and the weights of them if each is a part of a larger batch."""
        if loader in replicated:
            return self._all(loader, original), None
        shared = self._loaders.setdefault(loader, _Shared())
        if isinstance(loader.dataset, IterDataPipe):
            self._announce(loader, None)
            return iter(DealtBatches(self._all(loader, original), self._rank, self._size)), None
        if isinstance(loader.dataset, IterableDataset):
            return self._part_of_stream(loader, shared, original)
        shard = self._shard(loader, shared) if shared.lasting is None else shared.lasting
        if shared.lasting is None:
            with self._streams.shared():
                # what the loader's own iterator draws in a single process, so that the shared streams stay where they would be
                drawn = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item())
            # workers are seeded from here: augmentation must differ by rank, also where the user's generator is the same on all
            shard.generator = torch.Generator().manual_seed((drawn + self._rank) % 2**63)
        if loader.persistent_workers:
            shared.lasting = shard
        if isinstance(shard.sampler, DistributedSampler) and not isinstance(loader.sampler, DistributedSampler):
            shard.sampler.set_epoch(shared.epoch)
        shared.epoch += 1
        return original(shard), getattr(shard.sampler if shard.batch_sampler is None else shard.batch_sampler, "weights", None)

    def _all(self, loader: DataLoader, original: Callable[[DataLoader], Iterator]) -> Iterator:
        """All batches, the same on every rank."""
        with self._streams.shared():
            if isinstance(loader.dataset, IterableDataset):
                return iter(SharedDraws(original(loader), self._streams))
            return original(with_indices(loader, self._on_shared_streams(loader)))

    def _part_of_stream(self, loader: DataLoader, shared: _Shared, original: Callable[[DataLoader], Iterator]) -> tuple[Iterator, Any]:
        self._announce(loader, None)
        part = with_others(loader, **part_of(loader, self._pick(loader))) if shared.lasting is None else shared.lasting
        if loader.persistent_workers:
            shared.lasting = part
        with self._streams.shared():
            batches = original(part)
        weights: deque[float] | None = deque() if self._sharing().weighs_streams else None
        samples = (loader.batch_size or 1) / (self._size if self._splits(loader) else 1)

        def drawn() -> Iterator:
            nothing = object()
            while True:
                # who shards itself may draw more often on one rank than on another
                with nullcontext() if getattr(part.dataset, "shards_itself", False) else self._streams.shared():
                    batch = next(batches, nothing)
                if batch is nothing:
                    break
                if weights is not None:
                    weights.append(samples_in(batch) / samples)
                yield batch
            if self._group and threading.current_thread() is threading.main_thread():
                self._group.meet(END_OF_STREAM)  # parts may differ in length: who is through answers the others

        return drawn(), weights

    def _pick(self, loader: DataLoader) -> Pick:
        sharing = self._sharing()
        if self._size == 1 or not self._splits(loader):
            return Pick(self._rank, self._size, sharing.uneven)
        if sharing.loss == "sum":
            raise UsageError(
                'loss="sum" with batch="global" is not for an IterableDataset: how many samples the other ranks have in its last batch is '
                "not known. Have the loss be a mean over the batch."
            )
        if loader.batch_size < self._size:  # type: ignore[operator]
            raise UsageError(
                f'batch="global" cannot split the batches of an IterableDataset: {loader.batch_size} samples for {self._size} ranks. '
                'Raise batch_size, or give batch="per_rank".'
            )
        return Pick(self._rank, self._size, batch=loader.batch_size, drop_last=loader.drop_last)

    def agree(self, loader: DataLoader) -> None:
        """Have all ranks hold the same samples behind ``loader``, which is not shared out here."""
        changed = self._agreement.changed(loader) if self._agreement else []
        if changed and self._agreement:
            self._agreement.agree(loader, changed, 0)

    def length(self, loader: DataLoader, whole: int) -> int:
        """How many of a training pass's ``whole`` batches this rank gets."""
        if loader in replicated or self.shares_out_itself(loader) or self._splits(loader):
            return whole
        return share_length(loader, whole, self._size, self._sharing().uneven)

    def shares_out_itself(self, loader: DataLoader) -> bool:
        """Whether the user's own sampler shares out ``loader`` to as many ranks as there are."""
        return isinstance(loader.sampler, DistributedSampler) and loader.sampler.num_replicas == self._size > 1

    def _splits(self, loader: DataLoader) -> bool:
        return self._sharing().batch == "global" and loader.batch_sampler is not None and not isinstance(loader.dataset, IterDataPipe)

    def _shard(self, loader: DataLoader, shared: _Shared) -> DataLoader:
        """A copy for one pass: another pass over the same loader may be open, and options and dataset may have changed since."""
        samples = len(loader.dataset)  # type: ignore[arg-type]
        changed = self._agreement.changed(loader) if self._agreement else []
        if samples not in shared.seeds or changed:
            seed = self._seed(loader) if samples not in shared.seeds else shared.seeds[samples]
            if self._agreement:
                seed = self._agreement.agree(loader, changed, seed)
            if samples not in shared.seeds:
                self._announce(loader, samples)
            shared.seeds[samples] = seed
        if isinstance(loader.sampler, DistributedSampler):
            self._note(loader.sampler)
        if self.shares_out_itself(loader):
            return self._own_shard(loader, shared)
        batches, uneven = loader.batch_sampler, self._sharing().uneven
        if self._splits(loader):
            return with_indices(loader, SplitBatches(self._drawn(loader, shared), self._rank, self._size))
        if uneven == "drop":
            self._refuse_nothing(loader)
        if is_plain(loader) and uneven == "join" and batches is not None:
            # the batches of all ranks together, as one process with a batch that large would take them
            together = BatchSampler(self._drawn(loader, shared, loader.sampler), (loader.batch_size or 1) * self._size, loader.drop_last)
            return with_indices(loader, SplitBatches(together, self._rank, self._size))
        if is_plain(loader) and uneven != "join":
            sampler = distributed_sampler(loader, self._rank, self._size, shared.seeds[samples], uneven)
            indices = sampler if batches is None else BatchSampler(sampler, loader.batch_size or 1, loader.drop_last)
            return with_indices(loader, indices, sampler=sampler)
        return with_indices(loader, DealtBatches(self._drawn(loader, shared), self._rank, self._size, uneven))

    def _refuse_nothing(self, loader: DataLoader) -> None:
        """With ``uneven="drop"``, a loader that is too short would not be trained on at all."""
        try:
            whole = len(loader.sampler if is_plain(loader) or loader.batch_sampler is None else loader.batch_sampler)  # type: ignore[arg-type]
        except TypeError:
            return  # who does not know its length has a batch for every rank, or none
        if whole < self._size:
            what = "samples" if is_plain(loader) or loader.batch_sampler is None else "batches"
            raise UsageError(
                f'uneven="drop" leaves nothing to train on: a DataLoader has {whole} {what} for {self._size} ranks. '
                'Give uneven="pad", which repeats some, or uneven="join", or start fewer ranks.'
            )

    def _seed(self, loader: DataLoader) -> int:
        """The seed of one more loader."""
        generator = getattr(loader.sampler, "generator", None) or loader.generator
        with self._streams.shared():
            seed = torch.initial_seed() + ANOTHER_LOADER * self._sharded if generator is None else generator.initial_seed()
        self._sharded += 1
        return seed % 2**62

    def _drawn(self, loader: DataLoader, shared: _Shared, sampler: Any = None) -> Any:
        """What ``sampler``, or else what the loader draws from, draws, the same on all ranks."""
        draws = self._on_shared_streams(loader, sampler, 1 if self._splits(loader) else self._size)
        return SameDraws(draws, self._group, shared.draws, type(loader.sampler).__name__) if self._group else draws

    def _on_shared_streams(self, loader: DataLoader, sampler: Any = None, size: int = 1) -> SharedDraws:
        """What is drawn on all ranks, in the order in which it is best dealt out to ``size`` of them."""
        draws = sampler or (loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
        return SharedDraws(arranged(draws, size), self._streams)

    def _own_shard(self, loader: DataLoader, shared: _Shared) -> DataLoader:
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
        batches = loader.batch_sampler
        if batches is None:
            return with_indices(loader, sampler)
        if sampler is not loader.sampler:
            batches = copy.copy(batches)
            batches.sampler = sampler  # type: ignore[attr-defined]
        return with_indices(loader, batches, sampler=sampler)

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
