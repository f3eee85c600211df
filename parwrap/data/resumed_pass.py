"""Samplers for the rest of a pass: what follows the samples that were already trained on, divided among the present ranks.

Only indices are skipped; no sample is read. ``loader_position.py`` knows what was trained on before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, cycle, islice
from typing import Any

from torch.utils.data import DataLoader

from parwrap.data.loader_position import digest
from parwrap.data.passes import SharedDraws
from parwrap.data.samplers import distributed_sampler
from parwrap.errors import UsageError

__all__ = ["RestOfBatches", "RestOfSamples", "Resumed", "Skipping"]


class Resumed:
    """A saved position that a pass continues from.

    Attributes:
        state: the result of ``Position.state_dict()``.
        done: the samples or batches that were trained on.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        self.state, self.done = state, state["done"]

    def samples(self, loader: DataLoader, rank: int, size: int, uneven: str) -> RestOfSamples:
        """This rank's part of the remaining samples, in the order of ``DistributedSampler``."""
        order = distributed_sampler(loader, 0, 1, self.state["seed"][0])
        order.set_epoch(self.state["epoch"])
        return RestOfSamples(list(order), self.done, rank, size, uneven)

    def draws(self, draws: SharedDraws, size: int) -> RestOfBatches:
        """The remaining ``draws`` of a sampler; raises if the earlier ones differ, also between ranks."""
        draws.check = self.state["drawn"], self._check
        return RestOfBatches(draws, self.done, self.state["drawn"], size)

    def _check(self, drawn: Any) -> None:
        if drawn is None or digest(drawn) != self.state["last"]:
            raise UsageError(
                f"a DataLoader's sampler does not repeat its draws from before its state was taken: number {self.state['drawn']} of the "
                "pass differs, so the position cannot be restored. Its batch_size, weights and indices must be unchanged, and it must draw "
                "from torch, np.random or random while nothing else does, or from a generator that is one of its attributes."
            )


class RestOfSamples:
    """This rank's part of what follows the first ``done`` samples of an ``order``.

    All ranks get the same number of samples. As in ``DistributedSampler``, an incomplete last round is filled from the first samples, or
    dropped with ``uneven="drop"``.

    >>> [list(RestOfSamples("abcdefg", 4, rank, 2)) for rank in (0, 1)]
    [['e', 'g'], ['f', 'a']]
    """

    def __init__(self, order: Sequence, done: int, rank: int, size: int, uneven: str = "pad") -> None:
        rest = list(order[done:])
        if uneven == "drop":
            del rest[len(rest) - len(rest) % size :]
        self._indices = [*rest, *islice(cycle(order), -len(rest) % size)][rank::size]

    def __iter__(self) -> Iterator:
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self._indices)


class RestOfBatches:
    """The ``batches`` after the first ``done``, for one pass.

    Args:
        batches: the draws of a sampler.
        done: the number of batches to skip.
        drawn: the number to draw immediately, because loaders had read ahead.
        kept: the number to keep as ``first``, to fill the last round.

    >>> rest = RestOfBatches("abcde", done=2, drawn=3, kept=1)
    >>> list(rest), rest.first
    (['c', 'd', 'e'], ['a'])
    """

    def __init__(self, batches: Any, done: int, drawn: int, kept: int) -> None:
        self.within = batches
        self.first: list = []
        self._done, self._kept = done, kept
        self._drawing = enumerate(batches)
        self._ahead = [batch for batch in map(self._noted, islice(self._drawing, drawn)) if batch is not _LEFT_OUT]

    def _noted(self, drawn: tuple[int, Any]) -> Any:
        number, batch = drawn
        if number < self._kept:
            self.first.append(batch)
        return batch if number >= self._done else _LEFT_OUT

    def __iter__(self) -> Iterator:
        later = map(self._noted, self._drawing)
        return chain(self._ahead, (batch for batch in later if batch is not _LEFT_OUT))

    def __len__(self) -> int:
        return max(0, len(self.within) - self._done)


_LEFT_OUT = object()


class Skipping:
    """``batches`` without the first ``done``.

    >>> list(Skipping("abc", 2))
    ['c']
    """

    def __init__(self, batches: Iterable, done: int) -> None:
        self.within, self._done = batches, done

    def __iter__(self) -> Iterator:
        return islice(iter(self.within), self._done, None)

    def __len__(self) -> int:
        return max(0, len(self.within) - self._done)  # type: ignore[arg-type]
