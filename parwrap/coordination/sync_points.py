"""How ranks synchronize: who goes ahead, who waits, and who answers without a contribution.

Ranks enter a backward pass without waiting, so a regular run pays only for writing an entry. At every other sync point, a rank waits until
all ranks arrive. While it waits, it *answers* the others: it takes part in their backward passes without a contribution, so no rank hangs
when ranks take different paths. Once all wait, the sync point with the highest priority takes place; ranks that wait for another one answer
it and keep waiting. Ranks that have answered backward passes are *stale*: before they continue, they copy the state of a rank that is not
stale.

The code that registers an answer knows how to answer a sync point, and the ``Participant`` that has joined knows what a rank trains. This
file sends no data; see ``status_board.py``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta

from parwrap.coordination.call_site import location, warn
from parwrap.coordination.participant import Participant
from parwrap.coordination.rank_positions import RankPositions
from parwrap.coordination.status_board import KEPT, PART, EagerCoordinator, Entry, State, StatusBoard, SyncPoint
from parwrap.coordination.subgroup_sync import NestedCoordinator, answered_in_background
from parwrap.errors import RankMismatchError
from parwrap.system.remote_exception import in_one_line

__all__ = ["BACKWARD", "END", "FIRST_BACKWARD", "THEN_AVERAGED", "Coordinator"]

BACKWARD = "backward"
THEN_AVERAGED = "backward, averaged afterwards"
FIRST_BACKWARD = "its first backward pass here"
END = "the end of its script or function"
FILE = "a file that another rank must write"

POLLING = 5e-5
"""The initial number of seconds between two checks of the other ranks."""
LONGEST_POLLING = 2e-3
GRACE = 5.0
"""Seconds that a launcher needs to end the ranks after one has failed, so that only that rank's error is shown."""

Answer = Callable[[int, list[int]], bool | Callable[[], bool] | None]
"""A function, called with the sync point's detail and the ranks in it. It returns true, or a function that later returns true, if this rank
has missed nothing."""


class Coordinator(EagerCoordinator):
    """The sync points of this rank with the others, in their order.

    Args:
        status_board: the entries of the ranks.
        timeout: how long to wait for another rank.
        runs_ahead: whether this rank's host leaves a sync point before the others have come, as with a GPU.

    Attributes:
        part: the part of the run, a new one after each :meth:`begin`.
        rank_positions: the positions of all ranks.
        stale: whether other ranks have trained without this rank, and it has not copied their state yet.
        waits_for: the sync point that this rank waits for, if any.
        alike: whether all ranks in the last sync point gave the same ``detail``.
    """

    def __init__(self, status_board: StatusBoard, timeout: timedelta, runs_ahead: bool = False) -> None:
        super().__init__(status_board, runs_ahead)
        self.timeout, self._rank = timeout, status_board.world.rank
        self.waits_for: SyncPoint | None = None
        self.alike = True
        self._fetching, self.stale, self._warned, self._seen = False, False, False, 0
        self._answers, self._lasting = dict[str, Answer](), dict[str, Answer]()
        self._nested: list[NestedCoordinator] = []
        self.rank_positions = RankPositions(status_board, self._nested, runs_ahead)
        self._participant = Participant()

    def answer(self, kind: str, answer: Answer, lasting: bool = False) -> None:
        """Call ``answer`` when others synchronize for ``kind`` and this rank for something else; if ``lasting``, in later parts too."""
        self._answers[kind] = answer
        if lasting:
            self._lasting[kind] = answer

    def add_nested(self, nested: NestedCoordinator) -> None:
        """Answer the sync points of ``nested`` from now on, whenever this rank waits."""
        nested.begin(self.part)
        self._nested.append(nested)

    def answering(self) -> AbstractContextManager[None]:
        """Answer the nested sync points within this rank's sync point from another thread while the block runs.

        Its error is raised when the block ends.
        """
        return answered_in_background(self._nested, self.number) if self._nested else nullcontext()

    def raise_if_elsewhere(self, sync_point: SyncPoint) -> None:
        if self._status_board.agreed(self.number, sync_point):
            return
        elsewhere = [entry for entry in self._status_board.read_all(self.number) if entry and entry.state is State.CONTRIBUTING]
        kinds = {(entry.sync_point.kind, entry.sync_point.detail) for entry in elsewhere}
        if len(kinds) == 1 and len({entry.sync_point.identity for entry in elsewhere}) > 1:
            raise RankMismatchError(
                f"the ranks run backward passes of different batches: {_described(elsewhere)}. With batch='global', one rank cannot skip "
                "its part of a batch on its own, for example with `if not torch.isfinite(loss): continue`, and cannot leave the loop "
                "early on its own. Make the same decision on all ranks, for example from parwrap.reduce_mean(loss), or use "
                "batch='per_rank'."
            )
        if len(kinds) > 1:
            raise RankMismatchError(
                f"the ranks run different backward passes at the same time: {_described(elsewhere)}. Their gradients cannot be averaged "
                "with each other. Call backward() on the same losses in the same order on all ranks, or sum the losses and call "
                "backward() once."
            )

    def keep_pace(self, status_board: StatusBoard, number: int) -> None:
        earlier = number - KEPT
        if not self._runs_ahead or number & (1 << PART) - 1 <= KEPT or not status_board.behind(earlier):
            return
        deadline = time.monotonic() + self.timeout.total_seconds()
        before, status_board.waiting = status_board.waiting, True  # so that entries of other nodes come soon
        try:
            while status_board.behind(earlier, self._participant.lost() if status_board is self._status_board else ()):
                self._raise_if_failed([])
                if time.monotonic() > deadline and not self._participant.others_progress():
                    raise self.in_vain(f"{KEPT} sync points ago", None)
                time.sleep(POLLING)
        finally:
            status_board.waiting = before

    def answer_next(self, rank: int) -> bool:
        """Answer the sync point that ``rank`` has reached and this one has not, if it can be answered."""
        entry = self._status_board.read(rank, self.number)
        if entry is None or entry.sync_point.kind not in self._answers or threading.current_thread() is not threading.main_thread():
            return False
        self.wait(FILE, until_answered=True)
        return True

    def wait(
        self,
        kind: str,
        place: str | None = None,
        until_answered: bool = False,
        detail: int = 0,
        answers_backwards: bool = True,
        unless_begun: bool = False,
    ) -> list[int]:
        """Synchronize with all other ranks for ``kind``. Until they arrive, answer their other sync points.

        Args:
            kind: the purpose.
            place: the place in the user's script; found by default.
            until_answered: return after answering one sync point.
            detail: a 64-bit number that ranks compare; if it differs, they synchronize too, and :attr:`alike` is ``False``.
            answers_backwards: whether ranks may take different paths here. If not, a backward pass of another rank is an error.
            unless_begun: return no ranks if another rank has gone ahead to a sync point, without answering it.

        Returns:
            The ranks that synchronize for ``kind``; the others answer.

        Raises:
            RankMismatchError: the ranks wait for different purposes, one has failed, or one does not arrive in time.
        """
        place = location() if place is None else place
        if detail:
            sync_point = SyncPoint(kind, place, detail, SyncPoint(kind).identity)
        else:
            sync_point = SyncPoint(kind, place, self._participant.phase() if kind in self._answers else 0)
        self.keep_pace(self._status_board, self.number)
        deadline, polling = time.monotonic() + self.timeout.total_seconds(), POLLING
        self._wait(True, sync_point)
        try:
            while True:
                if self._status_board.written != (self.number, sync_point):
                    self._status_board.write(self.number, sync_point, State.WAITING, self.stale)
                entries = self._status_board.read_all(self.number, without=self._participant.lost())
                if unless_begun and any(entry and entry.state is State.CONTRIBUTING for entry in entries):
                    self._status_board.take_back(self.number)
                    return []
                if self._runs_ahead and self._answer_nested(sync_point):  # a host that went ahead is past them already
                    deadline = time.monotonic() + self.timeout.total_seconds()
                    continue
                if self._answer_begun(entries, answers_backwards):
                    if until_answered:
                        return []
                    deadline = time.monotonic() + self.timeout.total_seconds()
                    continue
                came = self._all_came(entries)
                if came:
                    present = self._hold(came)
                    if self._rank in present or until_answered or unless_begun:
                        return present
                    deadline = time.monotonic() + self.timeout.total_seconds()
                    continue
                if self._answer_nested(sync_point):
                    deadline = time.monotonic() + self.timeout.total_seconds()
                    continue
                self._raise_if_failed(entries)
                if time.monotonic() > deadline and not self._participant.others_progress():
                    raise self.in_vain(str(sync_point), None)
                time.sleep(polling)
                polling = min(1.5 * polling, LONGEST_POLLING)
        finally:
            self._wait(False)

    def fetching(self, purpose: str, step: int = 0) -> None:
        """Publish that this rank waits for another rank's file, or in ``step``, unless it is in a sync point or not in its main thread."""
        inside = self._status_board.written is not None and self._status_board.written[0] == self.number
        if not self._fetching and not inside and threading.current_thread() is threading.main_thread():
            self._fetching = self._status_board.waiting = True
            self._status_board.write(self.number, SyncPoint(purpose, location(), step), State.FETCHING)

    def hold_up(self, rank: int) -> None:
        """Keep waiting for a file of ``rank``. If that rank waits in a step, tell it not to wait for this one."""
        entry = (
            self._status_board.read(rank, self.number) if self._fetching and threading.current_thread() is threading.main_thread() else None
        )
        step = entry.sync_point.detail if entry and entry.state is State.FETCHING else 0
        if step and step == self._seen:  # read before this rank searched for the file again; a file from before the step existed by then
            self._participant.set_waiting(True, step)
        self._seen = step

    def fetched(self) -> None:
        """Publish that this rank no longer waits for another rank's file."""
        if self._fetching and threading.current_thread() is threading.main_thread():
            self._fetching = self._status_board.waiting = False
            self._participant.set_waiting(False)
            self._status_board.take_back(self.number)

    def passed(self, rank: int) -> bool:
        """Whether ``rank`` has reached this rank's next sync point, and so has passed this point of the script."""
        entry = self._status_board.read(rank, self.number)
        self._raise_if_failed([entry])
        return (entry is not None and entry.state not in (State.FETCHING, State.FAILED)) or any(
            nested.passed(rank) for nested in self._nested
        )

    def fail(self, error: BaseException) -> None:
        """Inform the ranks that would wait for this one that it has failed with ``error``."""
        self._status_board.write(self.number, SyncPoint(in_one_line(error)), State.FAILED)

    def miss(self) -> None:
        """Record that other ranks have taken a step without this one."""
        self.stale = True

    def begin(self) -> None:
        """Begin another part of the run, with only the lasting answers. Numbers restart, even if an error ended the last part."""
        self.part += 1
        self.number = (self.part << PART) + 1
        self.stale = False
        self._answers, self._participant = {**self._lasting}, Participant()
        for nested in self._nested:
            nested.begin(self.part)

    def join(self, participant: Participant) -> None:
        """Let ``participant`` take part in the sync points of this part of the run from now on."""
        self._participant = participant

    def raise_if_failed(self) -> None:
        """Raise an error if another rank has failed, and so reaches no further sync point."""
        self._raise_if_failed(self._status_board.read_all(self.number))

    def in_vain(self, what: str, owner: int | None) -> RankMismatchError:
        """The error of a timeout, for rank ``owner`` or for any."""
        whom = "the other ranks" if owner is None else f"rank {owner}"
        return RankMismatchError(
            f"rank {self._rank} timed out after waiting {self.timeout.total_seconds():g} s for {whom} to reach the same point ({what}). "
            f"{self.rank_positions.described()} A missing rank has ended, is stuck or took another path. If it is only slow, raise "
            "timeout=."
        )

    def _wait(self, waiting: bool, sync_point: SyncPoint | None = None) -> None:
        self._status_board.waiting, self.waits_for = waiting, sync_point
        self._participant.set_waiting(waiting)
        for nested in self._nested:
            nested.wait(waiting)

    def _answer_nested(self, sync_point: SyncPoint) -> bool:
        """Answer the nested sync points of other ranks before they reach ``sync_point``, which this rank waits for."""
        begun = [nested for nested in self._nested if nested.begun(self.number)]
        if begun and not self.stale:
            # they must read that before they come there themselves
            self.stale = True
            self._status_board.write(self.number, sync_point, State.WAITING, stale=True)
        return any(nested.answer_begun(self.number) for nested in begun)

    def _answer_begun(self, entries: list[Entry | None], answers: bool) -> bool:
        """Answer the sync point to which another rank has gone ahead, if there is one."""
        begun = next((entry for entry in entries if entry and entry.state is State.CONTRIBUTING), None)
        if begun is None:
            return False
        if not answers:
            raise RankMismatchError(
                "the ranks are at different points of the script, and their gradients cannot be averaged with each other: "
                f"{_described([entry for entry in entries if entry])}. Compute gradients in the same way on all ranks in each step, and "
                "step together."
            )
        self.signals.hold()
        try:
            self._status_board.write(self.number, begun.sync_point, State.ANSWERING)
            kept_up = self._answers[begun.sync_point.kind](begun.sync_point.detail, [])
            self.through()
        finally:
            self.signals.release()
        if callable(kept_up):
            waits_for, kept_up = self.waits_for, kept_up()
            self._wait(True, waits_for)  # it may have waited itself
        self.stale = self.stale or not kept_up
        return True

    def _all_came(self, entries: list[Entry | None]) -> list[Entry]:
        """The entries of all ranks once all of them wait, or are known to wait; otherwise an empty list."""
        came = [entry for entry in entries if entry and entry.state in (State.WAITING, State.MET)]
        return came if len(came) == len(entries) else []

    def _hold(self, came: list[Entry]) -> list[int]:
        """Run the sync point with the highest priority among those that ranks wait for, ``came``. Returns the ranks that wait for it."""
        chosen = max((entry.sync_point for entry in came), key=self._precedence)
        present = [entry.rank for entry in came if entry.sync_point.identity == chosen.identity]
        others = [entry for entry in came if entry.rank not in present]
        if others and chosen.kind not in self._answers:
            raise RankMismatchError(
                f"the ranks are at different points of the script, and would wait for each other forever: {_described(came)}. Take the "
                "same path on all ranks, or put what only one rank should do into a function with @parwrap.rank_zero_only."
            )
        self.alike = len({entry.sync_point.detail for entry in came if entry.rank in present}) == 1
        mine = next(entry.sync_point for entry in came if entry.rank == self._rank)
        self._status_board.write(self.number, mine, State.MET, self.stale)
        if any(entry.stale for entry in came):
            self._catch_up(came)
        self.through()
        if self._rank not in present and chosen.kind in self._answers:
            self._answers[chosen.kind](chosen.detail, present)
        return present

    def _precedence(self, sync_point: SyncPoint) -> tuple[int, int, bool, str]:
        """The priority of a sync point. First comes what other ranks can answer, by phase, and within a phase backward passes first; then
        collectives of the user; last leaving, and waiting for a file."""
        importance = {FILE: -1, END: 0}.get(sync_point.kind, 2 if sync_point.kind in self._answers else 1)
        return importance, -sync_point.detail, sync_point.kind == FIRST_BACKWARD, sync_point.kind

    def _catch_up(self, came: list[Entry]) -> None:
        """Make the stale ranks copy the state of the lowest rank that is not stale."""
        behind = [entry for entry in came if entry.stale]
        source = min(entry.rank for entry in came if not entry.stale)
        if self._rank == 0 and not self._warned:
            self._warned = True
            warn(
                f"parwrap: {_described(behind)}, and other ranks have trained in the meantime: it ran fewer batches (because of a break, "
                "a continue, a return or an exception of its own, or because its part of a stream is shorter). Their gradients were "
                f"averaged without it, and it now has the weights, buffers, optimizers and schedulers of rank {source}. This is shown "
                "once."
            )
        self._participant.take_state(source)
        # a rank that has ended misses what the others' scripts do after this, such as loading weights, and copies the state at the end
        self.stale = self.stale and any(entry.rank == self._rank and entry.sync_point.kind == END for entry in came)

    def _raise_if_failed(self, entries: list[Entry | None]) -> None:
        if self._runs_ahead:  # that rank may be sync points behind
            last = (self._status_board.last(rank)[0] for rank in range(self._status_board.world.size))
            entries = [entry for entry in last if entry and entry.number >> PART == self.part]
        failed = next(
            (entry for entry in entries if entry and entry.state is State.FAILED and entry.rank not in self._participant.lost()), None
        )
        if failed and time.time() > failed.since + GRACE:
            raise RankMismatchError(f"rank {failed.rank} failed with {failed.sync_point} while rank {self._rank} waited for it.")


def _described(entries: list[Entry]) -> str:
    return "; ".join(f"rank {entry.rank} is at {entry.sync_point}" for entry in entries)
