"""Meetings beside the main ones: what ranks do together within the forwards and backwards of their scripts.

A group of ranks has a mailbox of its own for them, and numbers of its own. They are entered without waiting. A rank that waits in a main
meeting answers them with nothing to contribute, so nobody hangs when ranks part ways. What is sent in them is known to who holds them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from parwrap.coordination.status_board import KEPT, PART, Entry, Mailbox, Meeting, State
from parwrap.errors import RankMismatchError
from parwrap.system.background import in_background

__all__ = ["Lane", "answered_beside"]

POLLING = 5e-5
"""Seconds between two looks at others."""

ROOM = 30
"""The bits of a meeting's detail that say what is sent; those above are the number of the main meeting that comes next."""


class Lane:
    """The meetings of some ranks beside the main ones.

    Args:
        mailbox: what those ranks have written about them.
        ranks: who they are, in the order of the mailbox.
        answer: called with what is sent, as given to :meth:`enter`, to take part with nothing.
        advice: what users can do where ranks are in different meetings, for the error text.
        runs_ahead: whether a rank's host goes on before the others have come, as with a GPU.

    Attributes:
        part: of the run, which is another one after each :meth:`begin`.
        number: of the meeting that this rank is in, or comes to next.
    """

    def __init__(
        self, mailbox: Mailbox, ranks: Sequence[int], answer: Callable[[int], None], advice: str = "", runs_ahead: bool = False
    ) -> None:
        self._mailbox, self._answer, self._advice, self._runs_ahead = mailbox, answer, advice, runs_ahead
        self._rank, self._ranks = mailbox.world.rank, tuple(ranks)
        self.part, self.number = -1, 0

    def begin(self, part: int) -> None:
        """Begin another part of the run."""
        if part != self.part:
            self.part, self.number = part, (part << PART) + 1

    def enter(self, kind: str, sent: int, main: int) -> None:
        """Go ahead to the next meeting.

        Args:
            kind: what it is, for error texts.
            sent: a number below ``2 ** ROOM`` by which others can answer.
            main: the number of the main meeting that this rank comes to next, or is in.

        Raises:
            RankMismatchError: another rank has gone ahead to another meeting.
        """
        meeting = Meeting(kind, detail=(main & (1 << PART) - 1) << ROOM | sent)
        if self._runs_ahead and self._mailbox.immediate and self.number & (1 << PART) - 1 > KEPT:
            while self._mailbox.behind(self.number - KEPT):
                time.sleep(POLLING)
        self._mailbox.write(self.number, meeting, State.CONTRIBUTING)
        self.compare()

    def compare(self) -> None:
        """See to it that no rank is in another meeting than the one that this rank has entered."""
        if self._mailbox.written and not self._mailbox.agreed(*self._mailbox.written):
            raise RankMismatchError(
                f"the ranks are in different places at the same time: {self._told()}. What they send there cannot be put together. "
                f"{self._advice}"
            )

    def through(self) -> None:
        """This rank is through with the meeting that it has entered, or answered."""
        self._mailbox.done(self.number)
        self.number += 1

    def begun(self, main: int) -> bool:
        """Whether another rank is in the next meeting, having come no further than the main meeting ``main``."""
        return self._begun(main) is not None

    def answer_begun(self, main: int) -> bool:
        """Take part, with nothing, in the meeting that another rank is in, if it has come no further than ``main``."""
        begun = self._begun(main)
        if begun is None:
            return False
        self._mailbox.write(self.number, begun.meeting, State.ANSWERING)
        self._answer(begun.meeting.detail & (1 << ROOM) - 1)
        self.through()
        return True

    def wait(self, waiting: bool) -> None:
        """Whether this rank waits for what others do."""
        self._mailbox.waiting = waiting

    def passed(self, rank: int) -> bool:
        """Whether ``rank`` has come to the meeting that is the next for this one."""
        return rank in self._ranks and self._mailbox.read(self._ranks.index(rank), self.number) is not None

    def inside(self, rank: int) -> Entry | None:
        """The meeting that ``rank`` is in, if it is in one."""
        if rank not in self._ranks:
            return None
        entry, inside = self._mailbox.last(self._ranks.index(rank))
        return entry if inside else None

    def _begun(self, main: int) -> Entry | None:
        entries = self._mailbox.read_all(self.number)
        begun = next((entry for entry in entries if entry and entry.state is State.CONTRIBUTING), None)
        if begun is None or begun.meeting.detail >> ROOM > main & (1 << PART) - 1:
            return None
        return begun

    def _told(self) -> str:
        entries = self._mailbox.read_all(self.number)
        return "; ".join(f"rank {self._ranks[entry.rank]} is in {entry.meeting}" for entry in entries if entry)


@contextmanager
def answered_beside(lanes: Sequence[Lane], number: int) -> Iterator[None]:
    """While this is held, a thread answers what others do in ``lanes`` within meeting ``number``; its error is raised in the end."""
    failed: list[BaseException] = []

    def answer(stopped: threading.Event) -> None:
        try:
            while not stopped.is_set():
                if not any(lane.answer_begun(number) for lane in lanes):
                    stopped.wait(POLLING)
        except BaseException as error:
            failed.append(error)

    try:
        with in_background(answer, "parwrap answering"):
            yield
    finally:
        if failed:
            raise failed[0]
