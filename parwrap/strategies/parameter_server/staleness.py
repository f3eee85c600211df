"""Decides which workers of a parameter server may continue: at their own pace, at most some steps ahead of the slowest, or all together.

Nothing is sent here. Workers do not wait for one that waits for others elsewhere, has ended or has died, and that one need not make up for
missed steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from parwrap.errors import RankMismatchError

__all__ = ["Staleness"]


@dataclass
class _Worker:
    """The state of a worker.

    Attributes:
        steps: the number of steps that it has asked for, by optimizer.
        asks: the optimizer whose step it waits for, and the number of its next sync point with other workers.
        step: the number of steps it has asked for, of all optimizers.
        waits_at: the number of the sync point at which it waits.
        holds_up: the step of worker 0 after which it writes the file that this worker waits for; 0 without one.
        level: the optimizers whose count of steps has caught up with other workers' since this one waited.
    """

    steps: Counter[int] = field(default_factory=Counter)
    asks: tuple[int, int] | None = None
    step: int = 0
    waits_at: int | None = None
    holds_up: int = 0
    level: set[int] = field(default_factory=set)


class Staleness:
    """Decides when workers may step.

    Args:
        workers: their ranks.
        staleness: how many steps one may be ahead of the slowest; 0 for all together, ``None`` for any number.

    >>> pace = Staleness([0, 1], staleness=1)
    >>> pace.push(0, optimizer=0, number=1); pace.released()
    [[0]]
    >>> pace.push(0, optimizer=0, number=1); pace.released()
    []
    >>> pace.push(1, optimizer=0, number=1); pace.released()
    [[0], [1]]
    """

    def __init__(self, workers: Iterable[int], staleness: int | None) -> None:
        self._staleness = staleness
        self._workers = {rank: _Worker() for rank in workers}

    def push(self, rank: int, optimizer: int, number: int, step: int = 0) -> None:
        """Record that a worker asks for a step of ``optimizer``: its ``step``-th, with sync point ``number`` as its next one."""
        worker = self._workers[rank]
        if optimizer not in worker.level:
            worker.level.add(optimizer)
            others = [each.steps[optimizer] for other, each in self._workers.items() if other != rank and not self._is_away(each, number)]
            worker.steps[optimizer] = max(worker.steps[optimizer], min(others, default=0))
        worker.steps[optimizer] += 1
        worker.waits_at, worker.holds_up, worker.asks, worker.step = None, 0, (optimizer, number), step

    def wait(self, rank: int, number: int, step: int = 0) -> None:
        """Record that a worker waits for others at sync point ``number``, or for a file that worker 0 writes after its ``step``."""
        worker = self._workers[rank]
        worker.waits_at, worker.holds_up = number, step
        worker.level.clear()

    def go_on(self, rank: int) -> None:
        """Record that a worker no longer waits."""
        self._workers[rank].waits_at, self._workers[rank].holds_up = None, 0

    def end(self, rank: int) -> None:
        """Forget a worker, which takes no further step."""
        self._workers.pop(rank, None)

    def released(self) -> list[list[int]]:
        """The workers whose steps are due, in lists that step together; each request is returned once.

        Raises:
            RankMismatchError: no step can ever become due.
        """
        asking = {rank: worker.asks for rank, worker in self._workers.items() if worker.asks}
        due = self._together(asking) if self._staleness == 0 else [[rank] for rank, asks in asking.items() if self._may(rank, *asks)]
        for rank in (rank for several in due for rank in several):
            self._workers[rank].asks = None
        if asking and not due:
            self._check(asking)
        return due

    def _may(self, rank: int, optimizer: int, number: int) -> bool:
        if self._staleness is None:
            return True
        others = [each.steps[optimizer] for each in self._workers.values() if not self._is_away(each, number)]
        return self._workers[rank].steps[optimizer] <= min(others) + self._staleness

    def _together(self, asking: dict[int, tuple[int, int]]) -> list[list[int]]:
        due = []
        for optimizer in sorted({asked for asked, _ in asking.values()}):
            several = [rank for rank, (asked, _) in asking.items() if asked == optimizer]
            number = max(asking[rank][1] for rank in several)
            if all(rank in several or self._is_away(worker, number) for rank, worker in self._workers.items()):
                due.append(sorted(several))
        return due

    def _check(self, asking: dict[int, tuple[int, int]]) -> None:
        number = max(number for _, number in asking.values())
        if all(rank in asking or self._is_away(worker, number) for rank, worker in self._workers.items()):
            steps = ", ".join(f"rank {rank} is at a step of optimizer {optimizer}" for rank, (optimizer, _) in sorted(asking.items()))
            raise RankMismatchError(
                f"the workers are at steps of different optimizers and would wait for each other forever: {steps}. Have all "
                "workers step in the same order, or leave staleness out."
            )

    def _is_away(self, worker: _Worker, number: int) -> bool:
        """Whether ``worker`` waits for workers whose next sync point has that ``number``, so that they need not wait for it.

        It may be past that sync point without having reported it yet. A worker that waits for a file can continue at any time, so it counts
        as waiting only if worker 0 has to take its present step before it writes the file.
        """
        if worker.holds_up:
            first = self._workers.get(0)
            return first is not None and first.asks is not None and first.step == worker.holds_up
        return worker.waits_at is not None and worker.waits_at >= number
