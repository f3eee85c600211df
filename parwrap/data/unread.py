"""The indices that a rank has not read at the end of its share: the batches that complete a pass without training.

Together with what the rank has read, they contain each sample of a single process once: repeated samples that fill a share are skipped, and
an incomplete batch comes last. Only indices are handled here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any

from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

from parwrap.data.dataset_summaries import length_of
from parwrap.data.evaluation_blocks import block
from parwrap.data.samplers import DealtBatches, SplitBatches

__all__ = ["Recorded", "Unread", "unread_of"]


MOST_SAMPLES = 2**20
"""The number of samples to remember from one pass, about 40 MB, unless the dataset has more. A pass that draws more may be endless."""


class Recorded:
    """The draws of a sampler in a pass, kept in ``drawn`` until that is set to ``None``. ``ended`` says whether they are complete.

    Args:
        batches: what the sampler draws.
        most: the maximum number of samples to keep; if a pass draws more, nothing is kept.

    >>> recorded = Recorded(["ab", "c"], most=3)
    >>> list(recorded), recorded.drawn, recorded.ended
    (['ab', 'c'], ['ab', 'c'], True)
    >>> recorded = Recorded(["ab", "cd"], most=3)
    >>> list(recorded), recorded.drawn
    (['ab', 'cd'], None)
    """

    def __init__(self, batches: Iterable, most: int) -> None:
        self.within, self._most = batches, most
        self.drawn: list | None = None
        self.ended = False

    def __iter__(self) -> Iterator:
        self.drawn, self.ended = [], False
        samples = 0
        for batch in self.within:
            if self.drawn is not None:
                self.drawn.append(batch)
                samples += len(batch) if isinstance(batch, Sized) else 1
                if samples > self._most:
                    self.drawn = None
            yield batch
        self.ended = True

    def __len__(self) -> int:
        return len(self.within)  # type: ignore[arg-type]


class Unread:
    """The unread part of one pass. The base class is for a plain loader, whose samples are dealt out one by one.

    Args:
        shard: the copy of the loader that draws this rank's share.
    """

    def __init__(self, shard: DataLoader) -> None:
        self._shard = shard

    def uneven_after(self, read: int) -> bool:
        """Whether the last of ``read`` batches differs from that of a single process: it repeats samples, or is not full."""
        sampler: Any = self._shard.sampler
        together = sampler.num_replicas * (self._shard.batch_size or 1)
        return read > 1 and len(sampler.dataset) % together != 0 and read == len(self._drawn_from())

    def rest(self, read: int) -> list:
        """The batches (or samples, without batching) that are unread after the first ``read`` of the share."""
        size, drop_last = self._shard.batch_size, self._shard.drop_last
        sampler: Any = self._shard.sampler
        order = _whole_order(sampler)
        whole = len(order) - len(order) % size if size and drop_last else len(order)
        mine = range(sampler.rank, sampler.total_size, sampler.num_replicas)
        done = read * (size or 1)
        seen = {place % len(order) for place in mine[:done]}
        own = [place for place in mine[done:] if place < whole and place not in seen]
        others = set(range(whole)) - seen - set(own)
        rest = [order[place] for place in (*own, *sorted(others))][: max(whole - len(seen), 0)]
        return _chunks(rest, size) if size else rest

    def known(self) -> bool:
        """Whether the rest is known, because all draws of the pass were kept. This is the same on all ranks at the end of their shares."""
        return True

    def forget(self) -> None:
        """Forget the draws once the purpose of the pass is known."""

    def _drawn_from(self) -> Any:
        return self._shard.sampler if self._shard.batch_sampler is None else self._shard.batch_sampler


class _UnreadDealt(Unread):
    """The unread part of batches that are dealt out in turn."""

    def uneven_after(self, read: int) -> bool:
        dealt = self._drawn_from()
        drawn, size = dealt.batches.drawn or [], dealt.size
        return read > 1 and dealt.batches.ended and len(drawn) % size != 0 and read == len(drawn) // size + 1

    def rest(self, read: int) -> list:
        dealt = self._drawn_from()
        drawn, rank, size = dealt.batches.drawn, dealt.rank, dealt.size
        seen = {rank + size * turn for turn in range(read)}
        if read == 1 and rank >= len(drawn):  # there are fewer batches than ranks: this rank got a batch of another rank
            seen = {(rank - len(drawn)) % len(drawn) if dealt.uneven == "pad" else 0}
        own = [place for place in range(rank, len(drawn), size) if place not in seen]
        others = [place for place in range(len(drawn)) if place not in seen and place not in own]
        return [drawn[place] for place in (*own, *others)]

    def known(self) -> bool:
        return self._drawn_from().batches.drawn is not None

    def forget(self) -> None:
        self._drawn_from().batches.drawn = None


class _UnreadParts(_UnreadDealt):
    """The unread part of batches that are split among the ranks."""

    def uneven_after(self, read: int) -> bool:
        split, size = self._drawn_from(), self._own_size()
        drawn = split.batches.drawn or []
        return size is not None and read > 1 and read == len(drawn) and len(drawn[-1]) < size * split.size

    def rest(self, read: int) -> list:
        split = self._drawn_from()
        rest: list = []
        for number, batch in enumerate(split.batches.drawn):
            whole = list(batch)
            if number < read:
                mine = block(len(whole), split.rank, split.size)
                mine = mine or range(1)  # a rank without a part has the first sample
                del whole[mine.start : mine.stop]
            rest += _chunks(whole, self._own_size() or len(whole))
        return rest

    def _own_size(self) -> Any:
        """The number of samples in a batch of a single process, if the ranks' samples are combined."""
        within, size = self._drawn_from().within, self._shard.batch_size
        return size if type(within) is BatchSampler and within.batch_size != size else None


def unread_of(shard: DataLoader) -> Unread | None:
    """The unread part of a pass over ``shard``. Call it before the pass."""
    drawn: Any = shard.sampler if shard.batch_sampler is None else shard.batch_sampler
    if isinstance(drawn, (DealtBatches, SplitBatches)):
        if not isinstance(drawn.batches, Recorded):
            drawn.batches = Recorded(drawn.batches, max(MOST_SAMPLES, length_of(shard.dataset)))
        return _UnreadDealt(shard) if isinstance(drawn, DealtBatches) else _UnreadParts(shard)
    return Unread(shard) if isinstance(shard.sampler, DistributedSampler) else None


def _whole_order(sampler: DistributedSampler) -> list:
    """The draws of ``sampler`` for all ranks in this pass, each sample once."""
    whole = copy.copy(sampler)
    whole.num_replicas, whole.rank, whole.drop_last = 1, 0, False
    whole.num_samples = whole.total_size = len(sampler.dataset)  # type: ignore[arg-type]
    return list(whole)


def _chunks(samples: Sequence, size: int) -> list:
    return [samples[start : start + size] for start in range(0, len(samples), size or 1)]
