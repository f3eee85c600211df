"""A blackboard: the ranks of one node put short vectors of numbers where all of them can read, one each at every turn.

It takes microseconds where a collective over sockets, with its threads, takes a fraction of a millisecond. A vector that all have put
stays until all have put that of the next turn but one. Who puts what when is the caller's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

__all__ = ["CAPACITY", "SharedVectors"]

CAPACITY = 1 << 18
"""Numbers in a vector at most. Memory is only taken for what is used."""

LINE = 8
"""Turns are so many numbers apart, or the ranks' caches would wait for each other."""

SPINS = 300
"""Looks at the others before this rank lets them have its core."""
POLLING = 5e-5
"""Seconds between two looks from then on."""


class SharedVectors:
    """The vectors of all ranks.

    Args:
        memory: that the ranks share, a writable buffer of ``SharedVectors.size(ranks)`` bytes.
        ranks: how many there are.
        rank: this one.

    >>> board = SharedVectors(bytearray(SharedVectors.size(1)), 1, 0)
    >>> board.put(1, torch.tensor([2.0, 3.0], dtype=torch.float64))
    >>> board.all(1, 2, lambda: None).tolist()
    [[2.0, 3.0]]
    """

    def __init__(self, memory: Any, ranks: int, rank: int) -> None:
        self._rank = rank
        self._turns = np.frombuffer(memory, np.int64, ranks * LINE)[::LINE]
        rows = np.frombuffer(memory, np.float64, offset=8 * ranks * LINE)
        self._rows = torch.from_numpy(rows).view(2, ranks, CAPACITY)

    @staticmethod
    def size(ranks: int) -> int:
        """The bytes that the vectors of so many ranks take."""
        return 8 * ranks * (LINE + 2 * CAPACITY)

    def put(self, turn: int, numbers: torch.Tensor) -> None:
        """This rank's vector for ``turn``, which grows."""
        self._rows[turn & 1, self._rank, : len(numbers)] = numbers
        # seen by the others in this order on x86; processors that reorder writes would need a barrier here, which Python has not
        self._turns[self._rank] = turn

    def all(self, turn: int, length: int, waiting: Callable[[], None]) -> torch.Tensor:
        """The vectors that all ranks have put for ``turn``, one a row, once they have.

        Args:
            turn: the last that this rank has put one for.
            length: of the vectors.
            waiting: called now and then while one is missing; may raise.
        """
        looks = 0
        while not (self._turns >= turn).all():
            looks += 1
            time.sleep(0 if looks < SPINS else POLLING)
            if looks % SPINS == 0:
                waiting()
        return self._rows[turn & 1, :, :length].clone()
