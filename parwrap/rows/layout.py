"""How the rows of a tensor lie on the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch

__all__ = ["Layout", "equal_parts"]

Segments = tuple[tuple[int, ...], ...]


class Layout:
    """Segments of rows, one after another. Each has contiguous parts, one for each rank in the order of ranks.

    The batch of a loader is one segment. ``torch.cat`` of two batches along their rows has two.

    Args:
        segments: for each segment, the number of rows of each rank.
        rank: this rank.

    Attributes:
        n: the number of rows of all ranks.
        mine: the number of rows of this rank.

    >>> layout = Layout(((2, 1),), rank=1)
    >>> layout.n, layout.mine, layout.own(torch.arange(3)).tolist()
    (3, 1, [2])
    """

    __slots__ = ("__dict__", "mine", "n", "rank", "segments")

    def __init__(self, segments: Segments, rank: int) -> None:
        self.segments, self.rank = segments, rank
        self.n = sum(map(sum, segments))
        self.mine = sum(each[rank] for each in segments)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Layout) and self.segments == other.segments)

    def __hash__(self) -> int:
        return hash(self.segments)

    @cached_property
    def per_rank(self) -> list[int]:
        """The number of rows of each rank."""
        return [sum(sizes) for sizes in zip(*self.segments, strict=True)]

    @cached_property
    def weight(self) -> float:
        """The weight of a mean over this rank's rows in the mean over ranks; 1.0 where all have equally many."""
        return self.mine * len(self.per_rank) / self.n if self.n else 1.0

    def _spans(self, rank: int) -> Iterator[tuple[int, int]]:
        """Where the rows of ``rank`` begin in the whole, and how many there are, for each segment."""
        at = 0
        for sizes in self.segments:
            yield at + sum(sizes[:rank]), sizes[rank]
            at += sum(sizes)

    def own(self, whole: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """This rank's rows of ``whole``, which has all of them in dimension ``dim``."""
        parts = [whole.narrow(dim, start, length) for start, length in self._spans(self.rank)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def own_of(self, items: list) -> list:
        """This rank's part of a list with an entry for each row."""
        return [item for start, length in self._spans(self.rank) for item in items[start : start + length]]

    def joined(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """The whole of which ``parts`` are the rows of each rank, in the first dimension."""
        if len(self.segments) == 1:
            return torch.cat(parts)
        pieces = [part.split([sizes[rank] for sizes in self.segments]) for rank, part in enumerate(parts)]
        return torch.cat([piece for segment in zip(*pieces, strict=True) for piece in segment])

    def times(self, factor: int) -> Layout:
        """The layout if each row becomes ``factor`` rows, next to each other."""
        return self if factor == 1 else Layout(tuple(tuple(size * factor for size in sizes) for sizes in self.segments), self.rank)

    def divided(self, factor: int) -> Layout | None:
        """The layout if ``factor`` rows become one; ``None`` if a rank has a part of one."""
        if any(size % factor for sizes in self.segments for size in sizes):
            return None
        return Layout(tuple(tuple(size // factor for size in sizes) for sizes in self.segments), self.rank)

    def repeated(self, times: int) -> Layout:
        """The layout of so many copies, one after another."""
        return Layout(self.segments * times, self.rank)

    def unrepeated(self, times: int) -> Layout | None:
        """The layout of one of so many equal copies; ``None`` if it is not such."""
        each, rest = divmod(len(self.segments), times)
        return Layout(self.segments[:each], self.rank) if not rest and self.segments == self.segments[:each] * times else None

    def after(self, others: list[Layout]) -> Layout:
        """The layout of these rows and then those of ``others``."""
        return Layout(sum((each.segments for each in others), self.segments), self.rank)

    def between(self, start: int, stop: int) -> tuple[Layout, int] | None:
        """The layout of the rows from ``start`` to ``stop``, and where they begin on this rank; ``None`` if they cut a segment."""
        at, mine = 0, 0
        for first, sizes in enumerate(self.segments):
            if at == start:
                end = at
                for last in range(first, len(self.segments)):
                    end += sum(self.segments[last])
                    if end == stop:
                        return Layout(self.segments[first : last + 1], self.rank), mine
                return None
            at += sum(sizes)
            mine += sizes[self.rank]
        return None


def equal_parts(rows: int, rank: int, size: int) -> Layout:
    """The layout of ``rows`` in parts whose sizes differ by at most one.

    >>> equal_parts(5, 0, 2).segments
    ((3, 2),)
    """
    each, more = divmod(rows, size)
    return Layout((tuple(each + (r < more) for r in range(size)),), rank)
