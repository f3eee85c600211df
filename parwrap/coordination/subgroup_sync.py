"""Nested sync points: what ranks do together within the forward and backward passes of their scripts.

A group of ranks has a separate status board and separate numbers for them. Ranks enter them without waiting. A rank that waits in a main
sync point answers them without a contribution, so no rank hangs when ranks take different paths. Callers define what is sent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from parwrap.coordination.status_board import PART, Entry, State, StatusBoard, SyncPoint
from parwrap.errors import RankMismatchError
from parwrap.system.background import in_background

__all__ = ["NestedCoordinator", "answered_in_background"]

POLLING = 5e-5
"""Seconds between two checks of other ranks."""

ROOM = 30
"""The bits of a sync point's detail that describe what is sent. The higher bits are the number of the next main sync point."""


class NestedCoordinator:
    """Sync points of some ranks, in addition to the main ones.

    Args:
        status_board: the entries of those ranks.
        ranks: the ranks in the order of the status board.
        answer: a function, called with ``sent``, as given to :meth:`enter`, to take part without a contribution.
        advice: advice in the error about ranks in different sync points.
        keep_pace: :meth:`Coordinator.keep_pace`.

    Attributes:
        part: the part of the run, a new one after each :meth:`begin`.
        number: the number of this rank's present or next sync point.
    """

    def __init__(
        self,
        status_board: StatusBoard,
        ranks: Sequence[int],
        answer: Callable[[int], None],
        advice: str = "",
        keep_pace: Callable[[StatusBoard, int], None] = lambda status_board, number: None,
    ) -> None:
        self._status_board, self._answer, self._advice, self._keep_pace = status_board, answer, advice, keep_pace
        self._rank, self._ranks = status_board.world.rank, tuple(ranks)
        self.part, self.number = -1, 0

    def begin(self, part: int) -> None:
        """Begin ``part`` of the run: number its sync points from 1. Nothing happens if this part has already begun."""
        if part != self.part:
            self.part, self.number = part, (part << PART) + 1

    def enter(self, kind: str, sent: int, main: int) -> None:
        """Enter the next sync point without waiting.

        Args:
            kind: its name in errors.
            sent: a number below ``2 ** ROOM`` by which others can answer.
            main: the number of this rank's present or next main sync point.

        Raises:
            RankMismatchError: another rank has gone ahead to another sync point.
        """
        sync_point = SyncPoint(kind, detail=(main & (1 << PART) - 1) << ROOM | sent)
        self._keep_pace(self._status_board, self.number)
        self._status_board.write(self.number, sync_point, State.CONTRIBUTING)
        self.compare()

    def compare(self) -> None:
        """Raise an error if a rank is in another sync point than the one that this rank has entered."""
        if self._status_board.written and not self._status_board.agreed(*self._status_board.written):
            raise RankMismatchError(
                f"the ranks are in different places at the same time: {self._described()}. Their data cannot be combined. {self._advice}"
            )

    def through(self) -> None:
        """Record that this rank has completed the sync point that it entered or answered."""
        self._status_board.done(self.number)
        self.number += 1

    def begun(self, main: int) -> bool:
        """Whether another rank is in the next nested sync point, and its present or next main sync point is not after ``main``."""
        return self._begun(main) is not None

    def answer_begun(self, main: int) -> bool:
        """Take part, without a contribution, in another rank's sync point, if that rank has reached at most ``main``."""
        begun = self._begun(main)
        if begun is None:
            return False
        self._status_board.write(self.number, begun.sync_point, State.ANSWERING)
        self._answer(begun.sync_point.detail & (1 << ROOM) - 1)
        self.through()
        return True

    def wait(self, waiting: bool) -> None:
        """Set whether this rank waits for what other ranks do."""
        self._status_board.waiting = waiting

    def passed(self, rank: int) -> bool:
        """Whether ``rank`` has reached this rank's next sync point."""
        return rank in self._ranks and self._status_board.read(self._ranks.index(rank), self.number) is not None

    def inside(self, rank: int) -> Entry | None:
        """The sync point that ``rank`` is in, if any."""
        if rank not in self._ranks:
            return None
        entry, inside = self._status_board.last(self._ranks.index(rank))
        return entry if inside else None

    def _begun(self, main: int) -> Entry | None:
        entries = self._status_board.read_all(self.number)
        begun = next((entry for entry in entries if entry and entry.state is State.CONTRIBUTING), None)
        if begun is None or begun.sync_point.detail >> ROOM > main & (1 << PART) - 1:
            return None
        return begun

    def _described(self) -> str:
        entries = self._status_board.read_all(self.number)
        return "; ".join(f"rank {self._ranks[entry.rank]} is in {entry.sync_point}" for entry in entries if entry)


@contextmanager
def answered_in_background(nested_coordinators: Sequence[NestedCoordinator], number: int) -> Iterator[None]:
    """Answer the nested sync points within sync point ``number`` from a background thread while the block runs.

    An error in that thread is raised when the block ends.
    """
    failed: list[BaseException] = []

    def answer(stopped: threading.Event) -> None:
        try:
            while not stopped.is_set():
                if not any(nested.answer_begun(number) for nested in nested_coordinators):
                    stopped.wait(POLLING)
        except BaseException as error:
            failed.append(error)

    try:
        with in_background(answer, "parwrap answering"):
            yield
    finally:
        if failed:
            raise failed[0]
