"""Batches of samples of similar length: they save padding, and give equal work to ranks that step together.

First the batch sampler, which knows nothing of loaders; then how lengths are read; then the interceptor of ``@uniform_length``, which
regroups the batches of shuffled loaders and trims all batches. ``collate.py`` makes the batches, and ``loaders.py`` deals them out.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, default_collate, get_worker_info
from torch.utils.weak import WeakIdKeyDictionary

from parwrap.data.collate import Trimmed, is_sequence, pad_collate
from parwrap.data.loaders import key_of, marked_like
from parwrap.data.samplers import DealtBatches, copied_with, is_plain, shuffles
from parwrap.errors import UsageError
from parwrap.intercept.interceptor import Interceptor
from parwrap.loop.random_streams import states_kept
from parwrap.options import check_positive
from parwrap.torch_private.dataloader import ITERATOR, kept_iterator

__all__ = ["Lengths", "UniformLength", "UniformLengthBatchSampler", "read_lengths"]

STARTS = 8
"""The number of places where the first round may be cut, from an eighth of its samples to all. Later cuts move with it."""


class UniformLengthBatchSampler(Sampler[list[int]]):
    """Makes batches of samples of similar length, for ``DataLoader(batch_sampler=...)``.

    Samples are sorted by length, and those of nearly the same length form a bucket. Batches are drawn at random from each bucket. A round
    has ``num_replicas`` batches of samples of similar length, whose sizes differ by at most one, so that ranks that step together have
    equal work. The order of rounds is random. Each pass contains every sample once, except what ``drop_last`` drops. All passes have the
    same number of batches: a multiple of ``num_replicas``, unless there are fewer samples than that, or all batches hold one sample. If
    samples do not divide evenly, several batches are slightly smaller.

    Inside ``parwrap.distributed``, omit ``num_replicas`` and ``rank``: parwrap arranges the batches for the ranks and deals them out. In
    your own distributed code, pass both, and each rank draws its part; ranks that lack a batch in the last round repeat another.
    Passes are counted, so each has a different order even without ``set_epoch``.

    Args:
        lengths: the length of each sample of the dataset, in tokens.
        batch_size: the maximum number of samples in a batch.
        max_tokens: the maximum number of tokens in a batch, including padding: its number of samples times the length of the longest. Give
            ``batch_size``, ``max_tokens`` or both.
        shuffle: if false, nothing is random: each pass has the same batches, with the longest first.
        seed: the seed of the order, the same on all ranks; each pass has a different order. ``None`` draws from torch's generator in each
            pass, as a shuffled ``DataLoader`` does; a ``torch.Generator`` is drawn from directly.
        drop_last: drop samples that do not fill a batch on every rank: different ones in each pass, or without ``shuffle`` the last ones of
            the dataset. Not with ``max_tokens``.
        multiple_of: round the length of a batch up to a multiple of this.
        slack: how much shorter than the longest sample of its bucket a sample may be, as a fraction of the longest. If there are too
            few samples of similar length for a batch on every rank, the next shorter ones join them.
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
        sizes = {"batch_size": batch_size, "max_tokens": max_tokens}
        check_positive(multiple_of=multiple_of, **{name: size for name, size in sizes.items() if size is not None})
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
        self._counted: dict[int, tuple[np.ndarray, int]] = {}  # for a number of ranks: the lengths and the batches of a pass
        self._refuse_too_long()

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next pass to ``epoch``. Later passes count from there.

        It has no effect without ``shuffle``, or if ``seed`` is not an integer.
        """
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
        shuffled = [_shuffled(samples, bucket, ranks, random) for bucket in buckets]
        rounds = [each for bucket in shuffled for each in bucket]
        order = random.permutation(len(rounds))
        whole = [rounds[i] for i in order if len(rounds[i]) >= ranks]
        incomplete = [rounds[i] for i in order if len(rounds[i]) < ranks]  # at most one incomplete round, which comes last
        return [batch for samples in [*whole, *incomplete] for batch in _batches(samples, ranks, random)]

    def _count(self, ranks: int) -> int:
        """The number of all batches of a pass, counted once, because loops ask for it in every step."""
        lengths, batches = self._counted.get(ranks, (None, 0))
        if lengths is not self.lengths:
            padded = -np.sort(-self._padded())
            buckets = self._cut(padded[: len(padded) - self._left_out(ranks)], ranks)
            batches = sum(min(bucket.rounds * ranks, bucket.end - bucket.start) for bucket in buckets)
            self._counted[ranks] = self.lengths, batches
        return batches

    def _left_out(self, ranks: int) -> int:
        return len(self.lengths) % (ranks * (self.batch_size or 1)) if self.drop_last else 0

    def _padded(self) -> np.ndarray:
        """The length of each sample after padding."""
        return -(-self.lengths // self.multiple_of) * self.multiple_of

    def _most(self, longest: int) -> int:
        """The number of samples that fit into a batch whose longest sample has the length ``longest``."""
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
            rounded = f", rounded up to multiple_of={self.multiple_of}" if self.multiple_of > 1 else ""
            raise UsageError(
                f"sample {int(self._padded().argmax())} takes {longest} tokens{rounded}, more than the limit of a batch, "
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


def _shuffled(samples: np.ndarray, bucket: _Bucket, ranks: int, random: np.random.Generator) -> list[np.ndarray]:
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


# the lengths of samples


class Lengths:
    """The lengths of the samples of datasets. Each dataset is read once, and again when its number of samples has changed.

    Args:
        length, pad_value: see :func:`read_lengths`.
    """

    def __init__(self, length: Any = None, pad_value: float | None = None) -> None:
        self._length, self._pad_value = length, pad_value
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def of(self, loader: DataLoader) -> np.ndarray | None:
        """The lengths of the samples of ``loader``; ``None`` if they do not differ or were not found."""
        dataset: Any = loader.dataset
        key, samples = key_of(loader), len(dataset)
        count, lengths = self._known.get(key, (-1, None))
        if count != samples:
            lengths = read_lengths(dataset, self._length, self._pad_value)
            self._known[key] = samples, lengths
        return lengths


def read_lengths(dataset: Any, length: Any = None, pad_value: float | None = None) -> np.ndarray | None:
    """The length of each sample of ``dataset``; ``None`` if lengths do not differ or were not found.

    Args:
        dataset: a dataset with a length and indices. After it is read, the random streams are restored.
        length: a sequence of the lengths; or a function that returns the length of a sample; or the name or position of the field in a
            sample. By default the count in ``attention_mask``, or the first sequence whose length differs between samples.
        pad_value: padding at the end of a sequence, which is not counted. Without ``length``, it is looked for in sequences of whole
            numbers only.

    Raises:
        UsageError: ``length`` does not fit the samples.

    >>> read_lengths([(torch.tensor([5, 6, 0]), 1), (torch.tensor([7, 0, 0]), 0)], pad_value=0)
    array([2, 1])
    """
    if isinstance(length, (Sequence, torch.Tensor, np.ndarray)) and not isinstance(length, str):
        lengths: np.ndarray | None = _given_lengths(length, len(dataset))
    else:
        with states_kept():
            lengths = _read(dataset, length, pad_value)
    return None if lengths is None or not len(lengths) or lengths.min() == lengths.max() else lengths


def _given_lengths(lengths: Any, samples: int) -> np.ndarray:
    if len(lengths) != samples:
        raise UsageError(
            f"length= has {len(lengths)} lengths, but the dataset of a shuffled DataLoader has {samples} samples. Pass one length "
            "for each sample. If a script has several datasets, pass a function that takes a sample and returns its length."
        )
    return np.asarray(lengths)


def _read(dataset: Any, length: Any, pad_value: float | None) -> np.ndarray | None:
    samples = (dataset[i] for i in range(len(dataset)))
    if callable(length):
        return np.array([_number(length(sample), length) for sample in samples])
    if length is not None:
        return np.array([_real_length(_field(sample, length), pad_value) for sample in samples])
    found = [_found(sample, pad_value) for sample in samples]
    for name in found[0] if found else ():
        lengths = np.array([each.get(name, 0) for each in found])
        if lengths.min() < lengths.max():
            return lengths
    return None


def _number(value: Any, length: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise UsageError(
            f"length={length!r} returned {value!r} for a sample, which is not a number of tokens: return an integer."
        ) from None


def _field(sample: Any, name: Any) -> Any:
    try:
        found = sample[name]
        len(found)
    except (KeyError, IndexError, TypeError):
        raise UsageError(
            f"length={name!r} does not name a sequence in samples of type {type(sample).__name__}: pass the name or index of one, "
            "or a function that returns the length of a sample."
        ) from None
    return found


def _found(sample: Any, pad_value: float | None) -> dict[Any, int]:
    """The possible lengths of a sample, by the field and the way of counting, the likeliest first."""
    if isinstance(sample, Mapping):
        fields = dict(sample)
    else:
        fields = dict(enumerate(sample)) if isinstance(sample, (tuple, list)) and not is_sequence(sample) else {None: sample}
    fields = {name: field for name, field in fields.items() if is_sequence(field)}
    found: dict[Any, int] = {}
    if isinstance(sample, Mapping) and "attention_mask" in fields:
        found["mask"] = int(np.count_nonzero(np.asarray(fields["attention_mask"])))
    found |= {("whole", name): len(field) for name, field in fields.items()}
    whole_numbers = {name: field for name, field in fields.items() if np.asarray(field).dtype.kind in "iu"}
    if pad_value is not None:
        found |= {("real", name): _real_length(field, pad_value) for name, field in whole_numbers.items()}
    return found


def _real_length(sequence: Any, pad_value: float | None) -> int:
    """The length of a sequence up to its last item that is not padding."""
    if pad_value is None or isinstance(sequence, str):
        return len(sequence)
    array = np.asarray(sequence)
    real = (array != pad_value).reshape(len(array), -1).any(axis=1) if array.size else array
    return int(real.nonzero()[0].max(initial=-1)) + 1


# plain loops


class UniformLength(Interceptor):
    """Regroups the batches of shuffled loaders, and trims those of all loaders that make batches.

    Args:
        lengths: the lengths of the samples of datasets.
        pad_value: the value of the padding; ``None`` if unknown.
        field: the name or position of the sequences in a sample, if known.
        max_tokens: the most tokens of a batch, instead of the loader's ``batch_size``.
        multiple_of: round the length of a batch up to a multiple of this.
    """

    def __init__(self, lengths: Lengths, pad_value: float | None, field: Any, max_tokens: int | None, multiple_of: int) -> None:
        self._lengths, self._pad_value, self._field = lengths, pad_value, field
        self._max_tokens, self._multiple_of = max_tokens, multiple_of
        self._copies: weakref.WeakKeyDictionary[DataLoader, DataLoader] = weakref.WeakKeyDictionary()
        self._samplers: weakref.WeakKeyDictionary[DataLoader, tuple[Any, UniformLengthBatchSampler]] = weakref.WeakKeyDictionary()

    def iterate(self, loader: DataLoader, original: Callable[[DataLoader], Iterator]) -> Iterator:
        return original(self._uniform(loader))

    def length(self, loader: DataLoader, original: Callable[[DataLoader], int]) -> int:
        """The length of the copy that is read. It may differ from the loader's if ``max_tokens`` limits the batches."""
        return original(self._uniform(loader))

    def _uniform(self, loader: DataLoader) -> DataLoader:
        """The copy of ``loader`` that is read: always the same object, because other interceptors keep facts about loaders by object."""
        if get_worker_info() is not None or loader.batch_sampler is None or isinstance(loader.collate_fn, Trimmed):
            return loader
        copy = self._copies.get(loader)
        if copy is None:
            copy = self._copies[loader] = copied_with(loader)
        marked_like(copy, loader)
        only_shuffled = _is_only_shuffled(loader)
        lengths = self._lengths.of(loader) if only_shuffled else None
        others: dict[str, Any] = {ITERATOR: kept_iterator(copy)}
        if lengths is not None:
            others |= {"batch_sampler": self._sampler(loader, lengths), "batch_size": None, "drop_last": False}
        others["collate_fn"] = self._collate(loader, pads=lengths is not None or not only_shuffled)
        vars(copy).update({**vars(loader), **others})
        return copy

    def _sampler(self, loader: DataLoader, lengths: np.ndarray) -> UniformLengthBatchSampler:
        """The sampler that replaces the loader's own, the same in all passes until the lengths change."""
        known, sampler = self._samplers.get(loader, (None, None))
        if sampler is None or known is not lengths:
            size = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
            sampler = UniformLengthBatchSampler(
                lengths,
                **(size if self._max_tokens is None else {"max_tokens": self._max_tokens}),
                seed=loader.sampler.generator,  # type: ignore[attr-defined]
                multiple_of=self._multiple_of,
            )
            self._samplers[loader] = lengths, sampler
        return sampler

    def _collate(self, loader: DataLoader, pads: bool) -> Trimmed:
        """The function that makes the batches: the user's own; or, in place of torch's, one that pads, if ``pads``."""
        collate = loader.collate_fn
        if pads and collate is default_collate:
            collate = pad_collate(self._pad_value or 0, self._multiple_of)
        return Trimmed(collate, self._pad_value, self._multiple_of, self._field)


def _is_only_shuffled(loader: DataLoader) -> bool:
    """Whether a pass reads every sample once, in random order, so that it may be reordered."""
    return (
        not isinstance(loader.dataset, IterableDataset)
        and type(loader.batch_sampler) is BatchSampler
        and is_plain(loader)
        and shuffles(loader)
    )
