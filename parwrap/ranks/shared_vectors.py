"""An all-gather in shared memory: in each turn every rank of a node writes one short vector of numbers, which all of them read.

It takes microseconds. A collective over sockets, with its threads, takes a fraction of a millisecond or more. In lockstep all ranks count
turns alike, and no rank is more than one turn ahead, so two places for each rank are enough.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from parwrap.ranks.platform import shared_memory

__all__ = ["CAPACITY", "SharedVectors", "keeps_order_of_writes"]

CAPACITY = 1 << 14
"""The most numbers in a vector. Memory is only taken when it is used."""

LINE = 8
"""The distance between the ranks' counters of turns, in numbers, so that each has a cache line to itself."""

SPINS = 300
"""How often a rank looks for the others' vectors before it sleeps between two looks."""

POLLING = 5e-5
"""Seconds between two looks."""


def keeps_order_of_writes() -> bool:
    """Whether other processes see a process's writes in order. Processors other than x86 need a memory barrier, which Python lacks."""
    return platform.machine().lower() in ("x86_64", "amd64")


class SharedVectors:
    """The vectors of the ranks of a node.

    Args:
        path: a new file, the same for all ranks, in a folder that only this user can access.
        ranks: the number of ranks.
        rank: this rank.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     vectors = SharedVectors(Path(folder) / "vectors", ranks=1, rank=0)
    ...     vectors.gather(torch.tensor([2.0, 3.0]), lambda: None)
    tensor([[2., 3.]])
    """

    def __init__(self, path: Path, ranks: int, rank: int) -> None:
        self._rank, self._turn = rank, 0
        size = 8 * ranks * (LINE + 2 * CAPACITY)
        memory = shared_memory(path, size)
        self._turns = np.frombuffer(memory, np.int64, ranks * LINE)[::LINE]
        self._rows = torch.from_numpy(np.frombuffer(memory, np.float64, offset=8 * ranks * LINE)).view(2, ranks, CAPACITY)

    def gather(self, numbers: torch.Tensor, check: Callable[[], None]) -> torch.Tensor:
        """The vectors of all ranks, one row for each rank.

        Args:
            numbers: this rank's vector, of at most ``CAPACITY`` numbers; those of all ranks have the same length and dtype.
            check: called now and then while a vector is missing; it may raise an error.
        """
        self._turn += 1
        place = self._rows[self._turn & 1, :, : len(numbers)]
        place[self._rank] = numbers
        self._turns[self._rank] = self._turn
        looks = 0
        while not (self._turns >= self._turn).all():
            looks += 1
            time.sleep(0 if looks < SPINS else POLLING)
            if looks % SPINS == 0:
                check()
        return place.to(numbers.dtype, copy=True)
