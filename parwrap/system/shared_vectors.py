"""Shared-memory all-gather: in each turn, every rank of a node writes one short vector of numbers, which all of them can read.

It takes microseconds, whereas a collective over sockets, with its threads, takes a fraction of a millisecond. A vector stays until its rank
writes again in the turn after the next one. The caller defines the turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

__all__ = ["CAPACITY", "SharedVectors"]

CAPACITY = 1 << 18
"""The most numbers in a vector. Memory is only taken when it is used."""

LINE = 8
"""The distance between the ranks' turn counters, in numbers, so that they are in separate cache lines."""

SPINS = 300
"""The number of checks for the others' vectors before this rank sleeps between checks."""
POLLING = 5e-5
"""Seconds to sleep between two checks."""


class SharedVectors:
    """The vectors of all ranks.

    Args:
        memory: shared memory, a writable buffer of ``SharedVectors.size(ranks)`` bytes.
        ranks: the number of ranks.
        rank: this rank.

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
        """The number of bytes that the vectors of that many ranks take."""
        return 8 * ranks * (LINE + 2 * CAPACITY)

    def put(self, turn: int, numbers: torch.Tensor) -> None:
        """Write this rank's vector for ``turn``, a number that grows with each call."""
        self._rows[turn & 1, self._rank, : len(numbers)] = numbers
        # others see the writes in this order on x86; processors that reorder writes would need a barrier here, which Python lacks
        self._turns[self._rank] = turn

    def all(self, turn: int, length: int, waiting: Callable[[], None]) -> torch.Tensor:
        """The vectors of all ranks for ``turn``, one per row, once all are written.

        Args:
            turn: the last turn that this rank has written.
            length: the length of the vectors.
            waiting: a function, called repeatedly while a vector is missing; it may raise an error.
        """
        looks = 0
        while not (self._turns >= turn).all():
            looks += 1
            time.sleep(0 if looks < SPINS else POLLING)
            if looks % SPINS == 0:
                waiting()
        return self._rows[turn & 1, :, :length].clone()
