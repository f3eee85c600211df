"""A batch sampler that groups samples of similar length: it saves padding, and gives equal work to ranks that step together.

It needs no process group and knows nothing of loaders. ``sample_lengths.py`` reads the lengths, ``padding.py`` makes the batches, and
``samplers.py`` deals them out to the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Sampler

from parwrap.data.samplers import DealtBatches
from parwrap.errors import UsageError

__all__ = ["UniformLengthBatchSampler"]

STARTS = 8
"""Where the first batch may be cut, as fractions of a batch. Later cuts move with it."""


class UniformLengthBatchSampler(Sampler[list[int]]):
    """Makes batches of samples of similar length, for ``DataLoader(batch_sampler=...)``.

    Samples are sorted, samples of nearly the same length form a bucket, and batches are drawn at random from each bucket. Batches form
    rounds of ``num_replicas``, with equally many samples of similar length, so that ranks that step together have equal work. The order of
    rounds is random. Each pass contains every sample once. All passes have the same number of batches: a multiple of ``num_replicas``,
    unless there are fewer samples than that, or ``batch_size=1``. If samples do not divide evenly, several batches are slightly smaller.

    Inside ``parwrap.distributed``, omit ``num_replicas`` and ``rank``: parwrap arranges the batches for the ranks and deals them out. In
    your own distributed code, pass both, and each rank draws its part. Passes are counted, so each has a different order even without
    ``set_epoch``.

    Args:
        lengths: the length of each sample of the dataset, in tokens.
        batch_size: the maximum number of samples in a batch.
        max_tokens: the maximum number of tokens in a batch, including padding: its number of samples times the length of the longest. Give
            either, or both.
        shuffle: if false, each pass has the same batches, with the longest first.
        seed: the seed of the order, the same on all ranks; each pass has a different order. ``None`` draws from torch's generator in each
            pass, as a shuffled ``DataLoader`` does; a ``torch.Generator`` is drawn from directly.
        drop_last: drop samples that do not fill a batch on every rank, different ones in each pass. Not with ``max_tokens``.
        multiple_of: round the length of a batch up to a multiple of this.
        slack: how much shorter than the longest sample of its bucket a sample may be, as a fraction of the longest. If too few samples of
            similar length make a batch, they go with the next shorter ones.
        num_replicas: the number of ranks to draw for.
        rank: the rank to draw for.

    Raises:
        UsageError: an invalid option, or a sample longer than ``max_tokens``.

    >>> sampler = UniformLengthBatchSampler([3, 9, 4, 8, 3, 9], batch_size=2, shuffle=False)
    >>> list(sampler), len(sampler)
    ([[1, 5], [3, 2], [0, 4]], 3)
    """

    def __init__(
        self,
        lengths: Sequence[int] | torch.Tensor | np.ndarray,
        batch_size: int | None = None,
        max_tokens: int | None = None,
        shuffle: bool = True,
        seed: int | torch.Generator | None = 0,
        drop_last: bool = False,
        *,
        multiple_of: int = 1,
        slack: float = 0.05,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        if batch_size is None and max_tokens is None:
            raise UsageError(
                "the batch size is not set: pass batch_size, the number of samples in a batch, or max_tokens, the number of tokens, or "
                "both."
            )
        for name, value in {"batch_size": batch_size, "max_tokens": max_tokens, "multiple_of": multiple_of}.items():
            if value is not None and not (isinstance(value, int) and not isinstance(value, bool) and value > 0):
                raise UsageError(f"{name}={value!r} is not a positive integer.")
        if not 0 <= slack < 1:
            raise UsageError(f"slack={slack!r} is not a fraction of the longest sample in the range [0, 1).")
        if drop_last and max_tokens is not None:
            raise UsageError(
                "drop_last drops samples that do not fill a batch, but with max_tokens batches have no fixed size: remove drop_last."
            )
        self.lengths = _checked(lengths)
        self.batch_size, self.max_tokens, self.drop_last = batch_size, max_tokens, drop_last
        self.shuffle, self.seed, self.multiple_of, self.slack = shuffle, seed, multiple_of, slack
        self.num_replicas, self.rank = _checked_rank(num_replicas, rank)
        self._epoch = 0
        self._counted: _Counted | None = None
        self._refuse_too_long()

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next pass to ``epoch``. Later passes count from there. This only works if ``seed`` is a number."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        # only when the first is asked for: torch's shuffled loaders draw their order then too
        yield from DealtBatches(self._pass(self.num_replicas), self.rank, self.num_replicas)

    def __len__(self) -> int:
        return -(-self._count(self.num_replicas) // self.num_replicas)

    def for_ranks(self, ranks: int) -> _Arranged:
        """All batches, in an order in which each group of ``ranks`` batches forms one step.

        Raises:
            UsageError: the sampler was made for one rank of several.
        """
        if self.num_replicas > 1:
            raise UsageError(
                f"a UniformLengthBatchSampler was made for rank {self.rank} of {self.num_replicas}, but parwrap would divide its batches "
                "again: remove num_replicas and rank."
            )
        return _Arranged(self, ranks)

    def _pass(self, ranks: int) -> list[list[int]]:
        """The batches of one more pass."""
        random = np.random.default_rng(self._next_seed()) if self.shuffle else None
        samples = np.arange(len(self.lengths))
        if left := self._left_out(ranks):
            samples = samples[:-left] if random is None else np.sort(random.permutation(samples)[left:])
        padded = self._padded()[samples]
        # among equally long samples, the order is random
        order = np.lexsort((samples if random is None else random.random(len(samples)), -padded))
        samples, padded = samples[order], padded[order]
        buckets = self._cut(padded, ranks)
        if random is None:
            rounds = [each for bucket in buckets for each in _rounds(samples[bucket.start : bucket.end], bucket, ranks)]
            return [samples[i::ranks].tolist() for samples in rounds for i in range(min(ranks, len(samples)))]
        buckets = self._moved(buckets, padded, ranks, random)
        shuffled = [_shuffled(samples, padded, bucket, ranks, random) for bucket in buckets]
        rounds = [each for bucket in shuffled for each in bucket]
        order = random.permutation(len(rounds))
        whole = [rounds[i] for i in order if len(rounds[i]) >= ranks]
        incomplete = [rounds[i] for i in order if len(rounds[i]) < ranks]  # at most one incomplete round, which comes last
        return [batch for samples in [*whole, *incomplete] for batch in _batches(samples, ranks, random)]

    def _count(self, ranks: int) -> int:
        """The number of all batches of a pass, counted once, because loops ask for it in every step."""
        if self._counted is None or self._counted.lengths is not self.lengths or self._counted.ranks != ranks:
            padded = -np.sort(-self._padded())
            buckets = self._cut(padded[: len(padded) - self._left_out(ranks)], ranks)
            batches = sum(min(bucket.rounds * ranks, bucket.end - bucket.start) for bucket in buckets)
            self._counted = _Counted(self.lengths, ranks, batches)
        return self._counted.batches

    def _left_out(self, ranks: int) -> int:
        return len(self.lengths) % (ranks * (self.batch_size or 1)) if self.drop_last else 0

    def _padded(self) -> np.ndarray:
        """The length of each sample after padding."""
        return -(-self.lengths // self.multiple_of) * self.multiple_of

    def _most(self, longest: int) -> int:
        """The number of samples that fit into a batch whose longest sample has this length."""
        by_tokens = max(1, self.max_tokens // max(1, longest)) if self.max_tokens else len(self.lengths)
        return min(by_tokens, self.batch_size or by_tokens)

    def _cut(self, padded: np.ndarray, ranks: int, start: float = 1.0) -> list[_Bucket]:
        """The buckets of ``padded`` samples, longest first. The first round has only the fraction ``start`` of its samples."""
        buckets: list[_Bucket] = []
        begin, count = 0, len(padded)
        while begin < count:
            most = self._most(padded[begin])
            each = ranks * most
            if start < 1:
                end, start = begin + ranks * max(1, round(most * start)), 1.0
            else:
                alike = int(np.searchsorted(-padded, -(1 - self.slack) * padded[begin], side="right")) - begin
                end = begin + max(1, alike // each) * each
            end = min(end, count)
            # samples that would not make a full round are divided within this bucket, if its batches can be smaller
            if end < count and count - end < ranks * (self._most(padded[end]) if most > 1 else 1):
                end = count
            buckets.append(_Bucket(begin, end, -(-(end - begin) // each)))
            begin = end
        return buckets

    def _moved(self, buckets: list[_Bucket], padded: np.ndarray, ranks: int, random: np.random.Generator) -> list[_Bucket]:
        """Buckets that are cut at other places than ``buckets``, with the same number of rounds.

        Otherwise samples that are much longer than all others would be in the same batches in all passes.
        """
        rounds = sum(bucket.rounds for bucket in buckets)
        for start in random.permutation(STARTS):
            moved = self._cut(padded, ranks, (start + 1) / STARTS)
            missing = rounds - sum(bucket.rounds for bucket in moved)
            if missing >= 0:
                for _ in range(missing):
                    fullest = max(range(len(moved)), key=lambda i: (moved[i].end - moved[i].start) / moved[i].rounds)
                    moved[fullest] = moved[fullest]._replace(rounds=moved[fullest].rounds + 1)
                return moved
        return buckets

    def _next_seed(self) -> Any:
        if isinstance(self.seed, int):
            self._epoch += 1
            return self.seed, self._epoch - 1
        drawn = torch.empty((), dtype=torch.int64).random_(generator=self.seed)
        return int(drawn.item()) % 2**63

    def _refuse_too_long(self) -> None:
        longest = int(self._padded().max(initial=0))
        if self.max_tokens is not None and longest > self.max_tokens:
            raise UsageError(
                f"sample {int(self._padded().argmax())} has {longest} tokens, more than the limit of a batch, "
                f"max_tokens={self.max_tokens}: raise max_tokens, or shorten or drop the sample."
            )


class _Arranged:
    """All batches of a sampler, in rounds of one batch per rank."""

    def __init__(self, sampler: UniformLengthBatchSampler, ranks: int) -> None:
        self._sampler, self._ranks = sampler, ranks

    def __iter__(self) -> Iterator[list[int]]:
        yield from self._sampler._pass(self._ranks)

    def __len__(self) -> int:
        return self._sampler._count(self._ranks)


@dataclass(frozen=True)
class _Counted:
    """The number of ``batches`` that samples with these ``lengths`` make for ``ranks``. It is not a sequence, because ranks would compare
    that."""

    lengths: np.ndarray
    ranks: int
    batches: int


class _Bucket(NamedTuple):
    """The sorted samples from ``start`` to before ``end``, which make ``rounds`` rounds."""

    start: int
    end: int
    rounds: int


def _rounds(samples: np.ndarray, bucket: _Bucket, ranks: int) -> list[np.ndarray]:
    """``samples`` in rounds, each with a batch for every rank. All rounds but one have a multiple of ``ranks`` samples."""
    columns, extra = divmod(len(samples), ranks)
    whole = min(bucket.rounds, columns)
    small, larger = divmod(columns, whole or 1)
    sizes = [ranks * (small + (i < larger)) for i in range(whole)]
    if whole < bucket.rounds:
        sizes.append(extra)
    else:
        sizes[-1] += extra
    return np.split(samples, np.cumsum(sizes)[:-1])


def _shuffled(samples: np.ndarray, padded: np.ndarray, bucket: _Bucket, ranks: int, random: np.random.Generator) -> list[np.ndarray]:
    """The rounds of a bucket, drawn at random, each with its longest sample first."""
    places = bucket.start + random.permutation(bucket.end - bucket.start)
    return [samples[np.sort(each)] for each in _rounds(places, bucket, ranks)]


def _batches(samples: np.ndarray, ranks: int, random: np.random.Generator) -> Iterator[list[int]]:
    """The batches of a round: each has one of the ``ranks`` longest samples, one of the next longest, and so on."""
    for first in random.permutation(min(ranks, len(samples))):
        yield random.permutation(samples[first::ranks]).tolist()


def _checked(lengths: Any) -> np.ndarray:
    array = np.asarray(lengths)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise UsageError(f"lengths has shape {array.shape} and dtype {array.dtype}: pass one integer for each sample of the dataset.")
    if array.size and array.min() < 0:
        raise UsageError(f"sample {int(array.argmin())} has a length of {int(array.min())}: lengths must be non-negative integers.")
    return array.astype(np.int64)


def _checked_rank(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    if num_replicas is None and rank is None:
        return 1, 0
    if num_replicas is None or rank is None:
        raise UsageError(f"num_replicas={num_replicas} and rank={rank}: pass both, or neither.")
    if not 0 <= rank < num_replicas:
        raise UsageError(f"rank={rank} is not in the range [0, {num_replicas}).")
    return num_replicas, rank
