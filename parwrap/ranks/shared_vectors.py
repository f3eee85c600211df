"""An all-gather in shared memory: in each turn every rank of a node writes one short vector of numbers, which all of them read.

It takes microseconds. A collective over sockets, with its threads, takes a fraction of a millisecond or more. In lockstep all ranks count
turns alike, and no rank is more than one turn ahead, so two places for each rank are enough.
"""

from __future__ import annotations

import platform
import secrets
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from parwrap.ranks.platform import shared_memory

__all__ = ["CAPACITY", "Messages", "SharedVectors", "keeps_order_of_writes"]

CAPACITY = 1 << 14
"""The most numbers in a vector. Memory is only taken when it is used."""

LINE = 8
"""The distance between the ranks' counters of turns, in numbers, so that each has a cache line to itself."""

SPINS = 300
"""How often a rank looks for the others' vectors before it sleeps between two looks."""

BUSY = 40
"""How often it looks before it lets another process run between two looks: the others are often nearly there."""

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
        self._rows = np.frombuffer(memory, np.float64, offset=8 * ranks * LINE).reshape(2, ranks, CAPACITY)

    def gather(self, numbers: torch.Tensor, check: Callable[[], None]) -> torch.Tensor:
        """The vectors of all ranks, one row for each rank.

        Args:
            numbers: this rank's vector, of at most ``CAPACITY`` numbers; those of all ranks have the same length and dtype.
            check: called now and then while a vector is missing; it may raise an error.
        """
        place = self._rows[(self._turn + 1) & 1, :, : len(numbers)]
        place[self._rank] = numbers.double().numpy()
        self._meet(check)
        return torch.from_numpy(place.copy()).to(numbers.dtype)

    def total(self, number: float, check: Callable[[], None]) -> float:
        """The sum of the numbers of all ranks; ``check`` as in :meth:`gather`."""
        place = self._rows[(self._turn + 1) & 1, :, 0]
        place[self._rank] = number
        self._meet(check)
        return float(place.sum())

    def _meet(self, check: Callable[[], None]) -> None:
        """Say that this rank has written its vector of this turn, and wait for the others."""
        self._turn += 1
        turn, turns = self._turn, self._turns
        turns[self._rank] = turn
        looks = 0
        while turns.min() < turn:
            looks += 1
            if looks > BUSY:
                time.sleep(0 if looks < SPINS else POLLING)
            if looks % SPINS == 0:
                check()


class Messages:
    """Sums and gathers vectors of the ranks of a process group: short ones of the CPU through shared memory, where that is possible.

    Args:
        process_group: torch's group of these ranks.
        control_message: makes a context manager that checks lockstep on the node before the message in it is sent.
        folder: a folder that all ranks share, if they are on one node and on the CPU: short vectors then travel through shared memory.
            ``None`` otherwise.
        opening: makes a context manager in which files of ``folder`` are opened.
    """

    def __init__(
        self,
        process_group: Any,
        control_message: Callable[[str], AbstractContextManager[Any]] = nullcontext,
        folder: Path | None = None,
        opening: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.process_group, self.control_message, self._folder, self._opening = process_group, control_message, folder, opening
        self._vectors: SharedVectors | None = None
        self.size = dist.get_world_size(process_group)

    def sum(self, kind: str, numbers: torch.Tensor) -> torch.Tensor:
        """The sum of the vectors of all ranks, exchanged in a message of this ``kind``."""
        with self.control_message(kind) as check:
            if memory := self._memory(numbers):
                return memory.gather(numbers, check).sum(0)
            dist.all_reduce(numbers, group=self.process_group)
            return numbers

    def gather(self, kind: str, numbers: torch.Tensor) -> torch.Tensor:
        """The vectors of all ranks as rows, exchanged in a message of this ``kind``."""
        with self.control_message(kind) as check:
            if memory := self._memory(numbers):
                return memory.gather(numbers, check)
            rows = numbers.new_empty(self.size, len(numbers))
            dist.all_gather(list(rows), numbers, group=self.process_group)
            return rows

    def total(self, kind: str, number: float, device: torch.device) -> float:
        """The sum of the numbers of all ranks, which ``device`` sends where there is no shared memory."""
        if self._vectors is None:
            return self.sum(kind, torch.full((1,), number, dtype=torch.float64, device=device)).item()
        with self.control_message(kind) as check:
            return self._vectors.total(number, check)

    def _memory(self, numbers: torch.Tensor) -> SharedVectors | None:
        """The shared memory through which ``numbers`` travel, or ``None``. The first message opens it, in a file that rank 0 names."""
        if self._folder is None or len(numbers) > CAPACITY or not numbers.is_cpu:
            return None
        if self._vectors is None:
            number, rank = torch.tensor(secrets.randbits(62)), dist.get_rank(self.process_group)
            dist.broadcast(number, group_src=0, group=self.process_group)
            path = self._folder / f"vectors-{number}"
            with self._opening(), torch.inference_mode(False):
                self._vectors = SharedVectors(path, self.size, rank)
                dist.all_reduce(number, group=self.process_group)  # wait until all ranks have opened it
                if rank == 0:
                    path.unlink()
        return self._vectors
