"""The actor on loaders: decides, when a pass over a loader begins, whether this rank sees all of it or its share.

What is read to be looked at (evaluation) is seen whole by every rank, so that printed metrics are those of a single
process; what is trained on is shared out. How indices are shared out is ``sharding.py``'s.
"""

from __future__ import annotations

import hashlib
import math
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Subset, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from parwrap.collectives import broadcast
from parwrap.data.sharding import DealtBatches, SplitBatches, distributed_sampler, is_plain, share_length, shuffles, with_indices
from parwrap.errors import RankMismatchError
from parwrap.group import Group, is_alone
from parwrap.loop import Loop
from parwrap.streams import Streams

__all__ = ["Loaders", "TrainingData"]

AGREEMENT = "training loader"

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
class _History:
    """What is known of one loader.

    Attributes:
        trains: what the last pass was for; ``None`` until there was one.
        has_trained: whether there ever was a backward in a pass.
        corrected: whether a pass has shown that the guess about this loader was wrong; then ``trains`` holds from then on.
        epoch: the number of training passes.
        agreed: the dataset and the seed to share out by, for each length that the dataset has had.
        lasting: the copy whose persistent workers stay from pass to pass.
    """

    trains: bool | None = None
    has_trained: bool = False
    corrected: bool = False
    epoch: int = 0
    agreed: dict[int, tuple[Any, int]] = field(default_factory=dict)
    lasting: DataLoader | None = None


class Loaders:
    """Shares out the loaders of a loop.

    Args:
        group: the ranks to share with; ``None`` for a single rank.
        loop: what the training loop has done so far.
        streams: the random streams; what other samplers draw must be drawn from the shared ones.
        split: whether each batch is split among the ranks (``batch="global"``) rather than every rank taking batches of
            its own.
        began: called at the first training pass.
    """

    def __init__(
        self,
        group: Group | None,
        loop: Loop,
        streams: Streams,
        split: Callable[[], bool],
        began: Callable[[TrainingData], None],
    ) -> None:
        self._group, self._loop, self._streams, self._split, self._began = group, loop, streams, split, began
        if group:
            group.meetings.answer(AGREEMENT, lambda detail, present: None)  # who has left shares out nothing
        self._rank, self._size = (group.world.rank, group.world.size) if group else (0, 1)
        self._histories: weakref.WeakKeyDictionary[DataLoader, _History] = weakref.WeakKeyDictionary()
        self._shuffled_seen = False
        self._sharded = 0

    def iterate(self, loader: DataLoader, original: Callable[[DataLoader], Iterator]) -> Iterator:
        """A pass over ``loader``."""
        if self._leaves_alone(loader):
            return original(loader)
        history = self._history(loader)
        if not torch.is_grad_enabled():
            return self._evaluation(original(loader), lambda exhausted: None)
        if not history.corrected:
            history.trains = not self._loop.evaluating()
        if not history.trains:
            return self._evaluation(original(loader), self._watch_evaluation(history))
        batches, weights = self._share(loader, history, original)
        self._loop.opened_pass()
        return _Pass(batches, self._watch_training(history), None if weights is None else lambda: self._weigh(weights.popleft()))

    def _evaluation(self, batches: Iterator, closed: Callable[[bool], None]) -> Iterator:
        self._loop.opened_evaluation()

        def all_closed(exhausted: bool) -> None:
            self._loop.closed_evaluation()
            closed(exhausted)

        return _Pass(batches, all_closed)

    def length(self, loader: DataLoader, original: Callable[[DataLoader], int]) -> int:
        """``len(loader)``: of what this rank gets to see of it."""
        whole = original(loader)
        if self._leaves_alone(loader) or not self._will_train(loader) or self._splits(loader):
            return whole
        return share_length(loader, whole, self._size)

    def _leaves_alone(self, loader: DataLoader) -> bool:
        """The user's own sharding is kept; a worker or a lone rank has nobody to share with."""
        return isinstance(loader.sampler, DistributedSampler) or get_worker_info() is not None or is_alone()

    def _history(self, loader: DataLoader) -> _History:
        self._shuffled_seen |= not isinstance(loader.dataset, IterableDataset) and shuffles(loader)
        return self._histories.setdefault(loader, _History())

    def _will_train(self, loader: DataLoader) -> bool:
        """The best guess for a loader that was not iterated yet: scripts ask for its length before the first pass."""
        history = self._history(loader)
        if history.has_trained:
            return torch.is_grad_enabled()
        if history.trains is not None:
            return history.trains
        if self._loop.in_eval_mode() or any(other.trains for other in self._histories.values()):
            return False
        return not self._shuffled_seen or shuffles(loader)

    def _splits(self, loader: DataLoader) -> bool:
        return self._split() and loader.batch_sampler is not None and not isinstance(loader.dataset, IterableDataset)

    def _share(self, loader: DataLoader, history: _History, original: Callable[[DataLoader], Iterator]) -> tuple[Iterator, Any]:
        """This rank's batches of a training pass, and the weights of them if each is a part of a larger batch."""
        if isinstance(loader.dataset, IterableDataset):
            self._announce(loader, None)
            with self._streams.shared():
                stream = _Shared(original(loader), self._streams)
            return iter(DealtBatches(stream, self._rank, self._size)), None
        shard = history.lasting or self._shard(loader, history)
        if history.lasting is None:
            with self._streams.shared():
                # what the loader's own iterator draws in a single process, so that the shared streams stay where they would be
                drawn = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item())
            # workers are seeded from here: augmentation must differ by rank, also where the user's generator is the same on all
            shard.generator = torch.Generator().manual_seed((drawn + self._rank) % 2**63)
        if loader.persistent_workers:
            history.lasting = shard
        if isinstance(shard.sampler, DistributedSampler):
            shard.sampler.set_epoch(history.epoch)
        history.epoch += 1
        return original(shard), getattr(shard.batch_sampler, "weights", None)

    def _shard(self, loader: DataLoader, history: _History) -> DataLoader:
        """A copy for one pass: another pass over the same loader may be open, and options and dataset may have changed since."""
        samples = len(loader.dataset)  # type: ignore[arg-type]
        if samples not in history.agreed:
            history.agreed[samples] = self._agree(loader)
            self._announce(loader, samples)
        dataset, seed = history.agreed[samples]
        batches = loader.batch_sampler
        if self._splits(loader):
            return with_indices(loader, SplitBatches(_Shared(batches, self._streams), self._rank, self._size), dataset=dataset)
        if is_plain(loader):
            sampler = distributed_sampler(loader, self._rank, self._size, seed)
            indices = sampler if batches is None else BatchSampler(sampler, loader.batch_size or 1, loader.drop_last)
            return with_indices(loader, indices, sampler=sampler, dataset=dataset)
        drawn = loader.sampler if batches is None else batches
        return with_indices(loader, DealtBatches(_Shared(drawn, self._streams), self._rank, self._size), dataset=dataset)

    def _agree(self, loader: DataLoader) -> tuple[Any, int]:
        """The dataset and the seed that all ranks shard by: rank 0's, where they may differ without harm."""
        dataset: Any = loader.dataset
        generator = getattr(loader.sampler, "generator", None) or loader.generator
        with self._streams.shared():
            seed = (torch.initial_seed() + ANOTHER_LOADER * self._sharded if generator is None else generator.initial_seed()) % 2**62
        self._sharded += 1
        if self._group is None:
            return dataset, seed
        indices = np.asarray(dataset.indices) if isinstance(dataset, Subset) else None
        digest = indices is not None and hashlib.sha256(indices.tobytes()).hexdigest()
        answers = list(self._group.exchange(AGREEMENT, (len(dataset), digest, seed)).values())
        lengths = [length for length, _, _ in answers]
        if len(set(lengths)) > 1:
            raise RankMismatchError(
                "the training datasets differ in length between ranks: "
                + ", ".join(f"{length} samples on rank {rank}" for rank, length in enumerate(lengths))
                + ". Every rank must build the whole dataset, the same one; parwrap shares it out."
            )
        if len({digest for _, digest, _ in answers}) > 1:
            warnings.warn("parwrap: the indices of a Subset differ between ranks; rank 0's are used on all of them.", stacklevel=2)
            dataset = Subset(dataset.dataset, broadcast(indices).tolist())
        return dataset, answers[0][2]

    def _announce(self, loader: DataLoader, samples: int | None) -> None:
        size = loader.batch_size
        if size is None:
            self._began(TrainingData(samples, None, None))
        elif self._splits(loader):
            self._began(TrainingData(samples, math.ceil(size / self._size), size))
        else:
            self._began(TrainingData(samples, size, size * self._size))

    def _weigh(self, weight: float) -> None:
        self._loop.weight = weight

    def _watch_training(self, history: _History) -> Callable[[bool], None]:
        before = self._loop.backwards

        def closed(exhausted: bool) -> None:
            self._loop.weight = 1.0
            self._loop.closed_pass()
            history.has_trained |= self._loop.backwards > before
            if exhausted and not history.has_trained:
                history.trains, history.corrected = False, True
                warnings.warn(
                    "parwrap: a DataLoader was read to its end without training, and each rank saw only its share of it. "
                    "From its next pass on every rank sees all of it; with torch.no_grad() around the loop, the first would too.",
                    stacklevel=2,
                )

        return closed

    def _watch_evaluation(self, history: _History) -> Callable[[bool], None]:
        before = self._loop.backwards

        def closed(exhausted: bool) -> None:
            if self._loop.backwards > before and not self._loop.passes:
                history.trains = history.has_trained = history.corrected = True
                warnings.warn(
                    "parwrap: a DataLoader was read in eval() mode or before any optimizer was built, and yet trained on: every rank "
                    "trained on all of it. From its next pass on each rank gets its share.",
                    stacklevel=2,
                )

        return closed


class _Shared:
    """What a sampler yields, each drawn on the shared streams, so that all ranks draw the same."""

    def __init__(self, indices: Any, streams: Streams) -> None:
        self._indices, self._streams = indices, streams

    def __iter__(self) -> Iterator:
        with self._streams.shared():
            drawing = iter(self._indices)
        nothing = object()
        while True:
            with self._streams.shared():
                drawn = next(drawing, nothing)
            if drawn is nothing:
                return
            yield drawn

    def __len__(self) -> int:
        return len(self._indices)


class _Pass:
    """The iterator of one pass; tells ``closed(exhausted)`` once, when it ends, fails or is dropped."""

    def __init__(self, batches: Iterator, closed: Callable[[bool], None], drawn: Callable[[], None] | None = None) -> None:
        self._batches, self._closed, self._drawn = batches, closed, drawn

    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except BaseException as ended:
            self._close(isinstance(ended, StopIteration))
            raise
        if self._drawn:
            self._drawn()
        return batch

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def __del__(self) -> None:
        self._close(False)

    def _close(self, exhausted: bool) -> None:
        closed, self._closed = self._closed, _ignore
        closed(exhausted)


def _ignore(exhausted: bool) -> None:
    pass
