"""Where every rank is: before a rank synchronizes with others, it writes which sync point it enters, for all ranks to read.

A sync point is anything that ranks do together: a backward pass, a reduction, the end. Every rank has a short ring buffer of entries, one
per sync point, in memory that the ranks of one node share. Across nodes, a thread copies it through the store. Writing takes microseconds
and needs no collective. This file contains the regular path, which enters a sync point without waiting. ``sync_points.py`` waits, answers
and raises errors.
"""

from __future__ import annotations

import mmap
import struct
import threading
import time
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from parwrap.coordination.held_signals import HeldSignals
from parwrap.system.background import in_background
from parwrap.system.shared_memory import shared_memory
from parwrap.world.world import World

__all__ = ["PART", "EagerCoordinator", "Entry", "State", "StatusBoard", "SyncPoint", "opened"]

KEPT, PARTS = 8, 3
"""The entries that a rank keeps of each part of the run, and the number of parts. Ranks are at most a sync point apart on the CPU; with a
GPU the host runs a few steps ahead. Two parts may begin with no sync point between them."""
RING = KEPT * PARTS

PART = 32
"""The bits of a sync point's number that count within a part of the run. The higher bits are the number of the part."""

TEXT = 220
CARRYING = 0.005
"""Seconds between two runs of the thread that copies entries across nodes."""

LOOKING = 1.0
"""Seconds between two reads of the other nodes' entries while this rank is not waiting."""

# in native byte order, which makes writing a number atomic
NUMBER = struct.Struct("q")
IDENTIFIED = struct.Struct("q q")
HEAD = struct.Struct(f"q {TEXT}s 28x")
"""The layout of a rank's summary: the number of the last sync point that it has completed, and its place."""
ENTRY = struct.Struct(f"q q q d B ? ? {TEXT}s x")
"""The layout of an entry: number, identity, detail, since, state, stale, diverged, text."""
DIVERGED = struct.calcsize("q q q d B ?")
ROW = HEAD.size + RING * ENTRY.size


class State(IntEnum):
    """How a rank takes part in a sync point."""

    WAITING = 1
    """It is in the sync point and waits for the others."""
    FETCHING = 2
    """It waits for a file of another rank, not for a sync point."""
    CONTRIBUTING = 3
    """It has gone ahead and relies on the others to follow."""
    ANSWERING = 4
    """It takes part without a contribution in what other ranks have begun."""
    MET = 5
    """All ranks were in it."""
    FAILED = 6
    """It has failed with an error and enters no further sync point."""


@dataclass(frozen=True)
class SyncPoint:
    """Something that ranks do together.

    Attributes:
        kind: what the ranks do, such as ``"backward"``.
        place: file and line in the user's script.
        detail: a number that distinguishes sync points of one kind.
        identity: identifies the sync point on other ranks. An entry contains its writer's identity, because a long ``kind`` is cut off.
    """

    kind: str
    place: str = ""
    detail: int = 0
    identity: int = field(default=0, compare=False)
    text: bytes = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "identity", self.identity or zlib.crc32(f"{self.kind}/{self.detail}".encode()))
        # the end of a path identifies it
        room = TEXT - len(self.kind) - 1
        object.__setattr__(self, "text", self.kind.encode() + b"\n" + self.place.encode()[-room:])

    def of_batch(self, number: int) -> SyncPoint:
        """This sync point for one batch, which all ranks in it must have."""
        return SyncPoint(self.kind, f"{self.place}, batch {number}", self.detail, zlib.crc32(f"{self.identity}/{number}".encode()))

    def __str__(self) -> str:
        return f"{self.kind} ({self.place})" if self.place else self.kind


@dataclass(frozen=True)
class Entry:
    """What one rank has written about one sync point."""

    rank: int
    number: int
    sync_point: SyncPoint
    state: State
    stale: bool
    since: float


class StatusBoard:
    """The entries of all ranks.

    Args:
        world: this rank's place.
        memory: a writable buffer for all ranks' entries, of ``StatusBoard.size(world)`` bytes.

    Attributes:
        waiting: whether this rank waits for entries of other ranks.
        written: the last sync point that this rank has entered, with its number.
        immediate: whether other ranks see an entry immediately.

    >>> status_board = StatusBoard(World(), bytearray(StatusBoard.size(World())))
    >>> status_board.write(1, SyncPoint("barrier", "train.py:7"), State.WAITING)
    >>> str(status_board.read(0, 1).sync_point)
    'barrier (train.py:7)'
    """

    def __init__(self, world: World, memory: Any) -> None:
        self.world, self._memory = world, memory
        self.waiting, self.immediate = False, isinstance(memory, mmap.mmap)
        self.written: tuple[int, SyncPoint] | None = None
        # bytes that are checked after each backward are adjacent, so that one comparison is enough
        self._rows = world.size * RING * NUMBER.size
        self._mine = self._row(world.rank)
        self._expected = 0, b""

    @staticmethod
    def size(world: World) -> int:
        """The size of all ranks' entries in bytes."""
        return world.size * (RING * NUMBER.size + ROW)

    def write(self, number: int, sync_point: SyncPoint, state: State, stale: bool = False) -> None:
        """Enter the ``number``-th sync point."""
        slot = _slot(number)
        at = self._mine + HEAD.size + slot * ENTRY.size
        NUMBER.pack_into(self._memory, at, 0)  # nobody may read it half written
        ENTRY.pack_into(self._memory, at, 0, sync_point.identity, sync_point.detail, time.time(), state, stale, False, sync_point.text)
        NUMBER.pack_into(self._memory, at, number)
        shown = sync_point.identity if state is State.CONTRIBUTING else 0
        NUMBER.pack_into(self._memory, (slot * self.world.size + self.world.rank) * NUMBER.size, shown)
        self.written = number, sync_point

    def take_back(self, number: int) -> None:
        """Mark that this rank will not complete the ``number``-th sync point, if it has entered it."""
        if self.written and self.written[0] == number:
            NUMBER.pack_into(self._memory, self._mine + _in_row(number), 0)
            self.written = None

    def done(self, number: int) -> None:
        """Mark that this rank has completed the ``number``-th sync point."""
        NUMBER.pack_into(self._memory, self._mine, number)

    def regular(self, number: int, sync_point: SyncPoint) -> bool:
        """Whether all ranks known to be in the ``number``-th sync point went ahead to ``sync_point`` without a report.

        For a rank that has not arrived yet, its entry from ``KEPT`` sync points ago counts.
        """
        if self._expected[0] != sync_point.identity:
            self._expected = sync_point.identity, NUMBER.pack(sync_point.identity) * self.world.size
        begin = self._glances(number)
        return self._memory[begin : begin + self.world.size * NUMBER.size] == self._expected[1]

    def behind(self, number: int, without: Collection[int] = ()) -> list[int]:
        """The ranks, ``without`` some, that may still be in the ``number``-th sync point or before: they have not entered the next."""
        return [rank for rank in range(self.world.size) if rank not in without and not self._has_left(rank, number)]

    def _has_left(self, rank: int, number: int) -> bool:
        row = self._row(rank)  # a rank completes several sync points at once, so that the entry of the next counts too
        return max(NUMBER.unpack_from(self._memory, row)[0], NUMBER.unpack_from(self._memory, row + _in_row(number + 1))[0] - 1) >= number

    def agreed(self, number: int, sync_point: SyncPoint) -> bool:
        """Whether no rank is known to be in another sync point with that number."""
        elsewhere = (IDENTIFIED.unpack_from(self._memory, self._row(rank) + _in_row(number)) for rank in range(self.world.size))
        return all(written != number or identity == sync_point.identity for written, identity in elsewhere)

    def notify(self, number: int) -> None:
        """Mark that this rank has a report in the ``number``-th sync point."""
        NUMBER.pack_into(self._memory, self._glances(number) + self.world.rank * NUMBER.size, 0)

    def diverge(self, number: int) -> None:
        """Mark that this rank does something unexpected in the ``number``-th sync point."""
        self._memory[self._mine + _in_row(number) + DIVERGED] = True
        self.notify(number)

    def any_diverged(self, number: int) -> bool:
        """Whether a rank has diverged in the finished ``number``-th sync point."""
        return any(self._memory[self._row(rank) + _in_row(number) + DIVERGED] for rank in range(self.world.size))

    def read(self, rank: int, number: int) -> Entry | None:
        """The entry of ``rank`` for the ``number``-th sync point, if it has arrived there."""
        at = self._row(rank) + _in_row(number)
        written, identity, detail, since, state, stale, _, text = ENTRY.unpack_from(self._memory, at)
        if not number or written != number or NUMBER.unpack_from(self._memory, at) != (number,):
            return None
        kind, _, place = text.rstrip(b"\0").decode(errors="replace").partition("\n")
        return Entry(rank, number, SyncPoint(kind, place, detail, identity), State(state), stale, since)

    def read_all(self, number: int, without: Collection[int] = ()) -> list[Entry | None]:
        """The entry of every rank except ``without`` for the ``number``-th sync point."""
        return [self.read(rank, number) for rank in range(self.world.size) if rank not in without]

    def last(self, rank: int) -> tuple[Entry | None, bool]:
        """The last sync point that ``rank`` has entered, and whether it is still in it."""
        row = self._row(rank)
        numbers = [NUMBER.unpack_from(self._memory, row + HEAD.size + slot * ENTRY.size)[0] for slot in range(RING)]
        entry = self.read(rank, max(numbers))
        return entry, entry is not None and entry.number > HEAD.unpack_from(self._memory, row)[0]

    @property
    def where(self) -> list[str]:
        """The last place that each rank has published."""
        heads = [HEAD.unpack_from(self._memory, self._row(rank)) for rank in range(self.world.size)]
        return [place.rstrip(b"\0").decode(errors="replace") for _, place in heads]

    def publish_place(self, place: str) -> None:
        """Publish that this rank is at ``place`` in its script."""
        # only the place: this thread must not overwrite a number that the main thread writes
        begin = self._mine + NUMBER.size
        self._memory[begin : begin + TEXT] = place.encode()[-TEXT:].ljust(TEXT, b"\0")

    def row(self) -> bytes:
        """This rank's own entries, for :meth:`take_row` of the others."""
        return bytes(self._memory[self._mine : self._mine + ROW])

    def take_row(self, rank: int, row: bytes) -> None:
        """Store the entries that ``rank`` has written on another node."""
        begin = self._row(rank)
        self._memory[begin : begin + ROW] = row

    def _row(self, rank: int) -> int:
        return self._rows + rank * ROW

    def _glances(self, number: int) -> int:
        """The offset of each rank's summary for the ``number``-th sync point."""
        return _slot(number) * self.world.size * NUMBER.size


def _slot(number: int) -> int:
    """The offset of the entry of the ``number``-th sync point. The end of one part and the beginning of the next do not overlap."""
    return number % KEPT + KEPT * ((number >> PART) % PARTS)


def _in_row(number: int) -> int:
    return HEAD.size + _slot(number) * ENTRY.size


class EagerCoordinator:
    """The sync points that ranks enter without waiting for each other, in the same order on all of them.

    A steady backward calls this twice, so the code of ``HeldSignals.hold`` and ``release`` is inlined.

    Args:
        status_board: the entries of the ranks.
        runs_ahead: whether this rank's host leaves a sync point before the others have come, as with a GPU.

    Attributes:
        part: the part of the run.
        number: the number of the next sync point, the same on all ranks.
        immediate: whether other ranks see an entry immediately.
        signals: delays signals that arrive while this rank is in a sync point that it went ahead to.
    """

    def __init__(self, status_board: StatusBoard, runs_ahead: bool = False) -> None:
        self._status_board, self._runs_ahead = status_board, runs_ahead
        self.immediate = status_board.immediate
        self.part, self.number = 0, 1
        self.signals = HeldSignals()

    def go_ahead(self, sync_point: SyncPoint) -> None:
        """Enter ``sync_point`` without waiting for the others.

        Raises:
            RankMismatchError: another rank has gone ahead to another sync point.
        """
        if self._runs_ahead:
            self.keep_pace(self._status_board, self.number)
        self.signals.held = threading.get_ident() == threading.main_thread().ident
        try:
            self._status_board.write(self.number, sync_point, State.CONTRIBUTING)
            self.compare(sync_point)
        except BaseException:
            self.signals.release()
            raise

    def compare(self, sync_point: SyncPoint) -> bool:
        """Check the other ranks in the running sync point.

        Whether no rank has a report. This is known once all data has been sent, and only if :attr:`immediate`.

        Raises:
            RankMismatchError: a rank is known to be in another sync point than this one.
        """
        if self._status_board.regular(self.number, sync_point):
            return True
        self.raise_if_elsewhere(sync_point)
        return False

    def raise_if_elsewhere(self, sync_point: SyncPoint) -> None:
        """Raise an error if a rank is known to be in another sync point than this one."""
        raise NotImplementedError

    def keep_pace(self, status_board: StatusBoard, number: int) -> None:
        """Wait until no rank needs the entry that the ``number``-th overwrites; this host may run ahead of the others."""
        raise NotImplementedError

    def notify(self) -> None:
        """Mark that this rank reports something in its running backward; the report travels with the gradients."""
        self._status_board.notify(self.number)

    def diverge(self) -> None:
        """Mark that this rank does something in its running backward that the others must follow."""
        self._status_board.diverge(self.number)

    def any_diverged(self) -> bool:
        """Whether any rank has diverged in the running backward, once all data has been sent; only if :attr:`immediate`."""
        return self._status_board.any_diverged(self.number)

    def through(self, over: bool = True) -> None:
        """Record that this rank has completed the sync point that it went ahead to. Unless ``over``, :meth:`past` follows later."""
        self.number += 1
        if over:
            self._status_board.done(self.number - 1)
        if self.signals.held:
            self.signals.held = False
            if self.signals.arrived:
                self.signals.run_arrived()

    def past(self) -> None:
        """Mark all sync points before the present one as completed."""
        self._status_board.done(self.number - 1)


@contextmanager
def opened(world: World, store: Any) -> Iterator[StatusBoard]:
    """The status board of the ranks of ``world``, which find each other through ``store``."""
    if world.on_one_node:
        yield StatusBoard(world, shared_memory(store, world.rank, range(world.size), StatusBoard.size(world)))
        return
    status_board = StatusBoard(world, bytearray(StatusBoard.size(world)))
    with _carried(status_board, store):
        yield status_board


@contextmanager
def _carried(status_board: StatusBoard, store: Any) -> Iterator[None]:
    """Copy entries between nodes inside the block."""
    store = store.clone()
    mine, others = status_board.world.rank, [rank for rank in range(status_board.world.size) if rank != status_board.world.rank]
    store.set(f"status/{mine}", bytes(ROW))

    def carry(stopped: threading.Event) -> None:
        sent, looked = b"", 0.0
        while not stopped.wait(CARRYING):
            now = status_board.row()
            if now != sent:
                store.set(f"status/{mine}", now)
                sent = now
            if status_board.waiting or time.monotonic() > looked + LOOKING:
                looked = time.monotonic()
                for rank, row in zip(others, store.multi_get([f"status/{rank}" for rank in others]), strict=True):
                    status_board.take_row(rank, row)

    with in_background(carry, "parwrap status board"):
        yield
