"""Measurements of the self test: correctness and speed of all-reduces, and the difference of the ranks' clocks.

Times become bandwidths as in nccl-tests (doc/PERFORMANCE.md there). Algorithm bandwidth is size / time. Bus bandwidth is algorithm
bandwidth times 2 (n - 1) / n, because each of n links carries at least 2 (n - 1) / n of the data. ``exam.py`` starts and ends the ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from parwrap.doctor.facts import Clock, Row
from parwrap.doctor.units import human_size
from parwrap.ranks.store import SignedStore

__all__ = ["SIZES", "all_reduces", "clocks", "row"]

SIZES = tuple(1024 * 16**power for power in range(5))
"""The sizes of all-reduces in bytes, from 1 KB to 64 MB."""

ROUNDS = 5
"""The number of times that a rank asks rank 0 for the time."""


def all_reduces(rank: int, size: int, device: torch.device | str, report: Callable[[str], None]) -> Iterator[Row]:
    """Measure an all-reduce over the default process group for each of ``SIZES``, and yield its row.

    The row has the time of the slowest rank, and whether the sum is right on all ranks.

    Args:
        rank: this rank.
        size: the number of ranks.
        device: the device of the backend.
        report: called with a text that names the next measurement.
    """
    for number in SIZES:
        report(f"all-reduce of {human_size(number)}")
        values = torch.arange(number // 4, device=device) % 7 + 1.0  # the sums are integers, so they are exact
        reduced = values * (rank % 8 + 1)
        dist.all_reduce(reduced)
        wrong = not torch.equal(reduced, values * sum(each % 8 + 1 for each in range(size)))
        seconds = _seconds(torch.zeros_like(values), repeats=min(50, max(3, 2**25 // number)))
        slowest = torch.tensor([seconds, wrong], dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        yield row(number, slowest[0].item(), size, right=not slowest[1].item())


def row(number: int, seconds: float, size: int, right: bool) -> Row:
    """The row of an all-reduce of ``number`` bytes on ``size`` ranks that took ``seconds``.

    >>> row(8_000_000, 0.002, 4, right=True)
    Row(bytes=8000000, seconds=0.002, algorithm_bandwidth=4000000000.0, bus_bandwidth=6000000000.0, right=True)
    """
    algorithm = number / seconds
    return Row(number, seconds, algorithm, algorithm * 2 * (size - 1) / size, right)


def _seconds(tensor: torch.Tensor, repeats: int) -> float:
    dist.all_reduce(tensor)
    _finish(tensor)
    began = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(tensor)
    _finish(tensor)
    return (time.perf_counter() - began) / repeats


def _finish(tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu":
        torch.accelerator.synchronize()


def clocks(store: SignedStore, rank: int, size: int, clock: Callable[[], float] = time.time) -> list[Clock]:
    """The difference of each rank's clock from rank 0's. On ranks other than 0, the result is empty.

    As in NTP, a rank notes when it asks and when the answer arrives, and assigns the answer to the midpoint. The shortest of several rounds
    counts; its error is at most half of its duration.

    Args:
        store: a store that all ranks share.
        rank: this rank.
        size: the number of ranks.
        clock: this rank's clock, in seconds.
    """
    if rank == 0:
        for other in range(1, size):
            for number in range(ROUNDS):
                store.get(f"question {number} of {other}", bool)
                store.set(f"time {number} for {other}", clock())
        return [Clock(other, *store.get(f"clock of {other}", list)) for other in range(1, size)]
    rounds = []
    for number in range(ROUNDS):
        began = clock()
        store.set(f"question {number} of {rank}", True)
        answer = store.get(f"time {number} for {rank}", float)
        ended = clock()
        rounds.append(((ended - began) / 2, (began + ended) / 2 - answer))
    uncertainty, ahead = min(rounds)
    store.set(f"clock of {rank}", [ahead, uncertainty])
    return []
