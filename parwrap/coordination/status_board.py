"""Who is where: before a rank meets the others it writes down, where all ranks can read it, which meeting it enters.

A meeting is anything that ranks do together: a backward, a reduction, the end. Every rank has a short ring of entries of its
own, one for each meeting, in a memory that the ranks of one node share; across nodes a thread carries it through the store.
Writing costs microseconds and no collective. What follows from the entries is decided in ``sync_points.py``.
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

from parwrap.system.background import in_background
from parwrap.system.shared_memory import shared_memory
from parwrap.world.world import World

__all__ = ["PART", "Entry", "Mailbox", "Meeting", "State", "opened"]

KEPT, PARTS = 8, 3
"""Entries that a rank keeps of each part of the run, and of how many parts. Ranks are at most a meeting apart on the CPU; with a GPU
the host runs a few steps ahead. Two parts may begin with no meeting between them."""
RING = KEPT * PARTS

PART = 32
"""The bits of a number that count within a part; those above are the part's."""

TEXT = 220
CARRYING = 0.005
"""Seconds between two looks of the thread that carries entries across nodes."""

LOOKING = 1.0
"""Seconds between two looks at the other nodes while this rank waits for nobody."""

# in native order, in which a number is written at once
NUMBER = struct.Struct("q")
IDENTIFIED = struct.Struct("q q")
HEAD = struct.Struct(f"q {TEXT}s 28x")
"""The number of the last meeting that a rank is through with, and where it is."""
ENTRY = struct.Struct(f"q q q d B ? ? {TEXT}s x")
"""Number, identity, detail, since, state, stale, astray, text."""
ASTRAY = struct.calcsize("q q q d B ?")
ROW = HEAD.size + RING * ENTRY.size


class State(IntEnum):
    """How a rank takes part in a meeting."""

    WAITING = 1
    """It is there, and waits for the others to come."""
    FETCHING = 2
    """It waits for a file of another rank, not for a meeting."""
    CONTRIBUTING = 3
    """It has gone ahead and counts on the others to come."""
    ANSWERING = 4
    """It takes part in what others have begun, with nothing to contribute."""
    MET = 5
    """All ranks were there."""
    FAILED = 6
    """It has left with an error and comes to no meeting any more."""


@dataclass(frozen=True)
class Meeting:
    """What ranks do together.

    Attributes:
        kind: such as ``"backward"``.
        place: file and line in the user's script.
        detail: a number by which meetings of one kind are told apart.
        identity: what others know it by; an entry has that of its writer, where a long ``kind`` is cut off.
    """

    kind: str
    place: str = ""
    detail: int = 0
    identity: int = field(default=0, compare=False)
    text: bytes = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "identity", self.identity or zlib.crc32(f"{self.kind}/{self.detail}".encode()))
        # a path is known by its end
        room = TEXT - len(self.kind) - 1
        object.__setattr__(self, "text", self.kind.encode() + b"\n" + self.place.encode()[-room:])

    def of_batch(self, number: int) -> Meeting:
        """The same for one batch, which ranks in this meeting must all be at."""
        return Meeting(self.kind, f"{self.place}, batch {number}", self.detail, zlib.crc32(f"{self.identity}/{number}".encode()))

    def __str__(self) -> str:
        return f"{self.kind} ({self.place})" if self.place else self.kind


@dataclass(frozen=True)
class Entry:
    """What one rank has written about one meeting."""

    rank: int
    number: int
    meeting: Meeting
    state: State
    stale: bool
    since: float


class Mailbox:
    """The entries of all ranks.

    Args:
        world: this rank's place.
        memory: room for all ranks' entries, as a writable buffer of ``Mailbox.size(world)`` bytes.

    Attributes:
        waiting: whether this rank waits for what others write.
        written: the meeting that this rank has entered last, with its number.
        immediate: whether it is seen at once by all ranks when one has written something.

    >>> mailbox = Mailbox(World(), bytearray(Mailbox.size(World())))
    >>> mailbox.write(1, Meeting("barrier", "train.py:7"), State.WAITING)
    >>> str(mailbox.read(0, 1).meeting)
    'barrier (train.py:7)'
    """

    def __init__(self, world: World, memory: Any) -> None:
        self.world, self._memory = world, memory
        self.waiting, self.immediate = False, isinstance(memory, mmap.mmap)
        self.written: tuple[int, Meeting] | None = None
        # what is looked at after each backward lies together, so that one comparison of bytes does
        self._rows = world.size * RING * NUMBER.size
        self._mine = self._row(world.rank)
        self._expected = 0, b""

    @staticmethod
    def size(world: World) -> int:
        """The bytes that the entries of all ranks take."""
        return world.size * (RING * NUMBER.size + ROW)

    def write(self, number: int, meeting: Meeting, state: State, stale: bool = False) -> None:
        """Enter the ``number``-th meeting."""
        at = self._mine + _in_row(number)
        NUMBER.pack_into(self._memory, at, 0)  # nobody is to read it half written
        ENTRY.pack_into(self._memory, at, 0, meeting.identity, meeting.detail, time.time(), state, stale, False, meeting.text)
        NUMBER.pack_into(self._memory, at, number)
        self._show(number, meeting.identity if state is State.CONTRIBUTING else 0)
        self.written = number, meeting

    def take_back(self, number: int) -> None:
        """This rank does not come to the ``number``-th meeting, if it has entered that."""
        if self.written and self.written[0] == number:
            NUMBER.pack_into(self._memory, self._mine + _in_row(number), 0)
            self.written = None

    def done(self, number: int) -> None:
        """This rank is through with the ``number``-th meeting."""
        NUMBER.pack_into(self._memory, self._mine, number)

    def regular(self, number: int, meeting: Meeting) -> bool:
        """Whether all ranks that are known to be in the ``number``-th meeting went ahead to ``meeting``, with nothing to tell.

        Who has not come yet counts with what it did ``KEPT`` meetings ago.
        """
        if self._expected[0] != meeting.identity:
            self._expected = meeting.identity, NUMBER.pack(meeting.identity) * self.world.size
        begin = self._glances(number)
        return self._memory[begin : begin + self.world.size * NUMBER.size] == self._expected[1]

    def behind(self, number: int) -> bool:
        """Whether a rank is not through yet with the ``number``-th meeting."""
        return any(NUMBER.unpack_from(self._memory, self._row(rank))[0] < number for rank in range(self.world.size))

    def agreed(self, number: int, meeting: Meeting) -> bool:
        """Whether no rank is known to be in another meeting with that number."""
        elsewhere = (IDENTIFIED.unpack_from(self._memory, self._row(rank) + _in_row(number)) for rank in range(self.world.size))
        return all(written != number or identity == meeting.identity for written, identity in elsewhere)

    def tell(self, number: int) -> None:
        """This rank has something to tell in the ``number``-th meeting."""
        self._show(number, 0)

    def go_astray(self, number: int) -> None:
        """In the ``number``-th meeting, this rank does something else than was expected of it."""
        self._memory[self._mine + _in_row(number) + ASTRAY] = True
        self.tell(number)

    def any_astray(self, number: int) -> bool:
        """Whether a rank has gone astray in the ``number``-th meeting, which is over."""
        return any(self._memory[self._row(rank) + _in_row(number) + ASTRAY] for rank in range(self.world.size))

    def read(self, rank: int, number: int) -> Entry | None:
        """What ``rank`` has written about the ``number``-th meeting, if it has come there."""
        at = self._row(rank) + _in_row(number)
        written, identity, detail, since, state, stale, _, text = ENTRY.unpack_from(self._memory, at)
        if not number or written != number or NUMBER.unpack_from(self._memory, at) != (number,):
            return None
        kind, _, place = text.rstrip(b"\0").decode(errors="replace").partition("\n")
        return Entry(rank, number, Meeting(kind, place, detail, identity), State(state), stale, since)

    def read_all(self, number: int, without: Collection[int] = ()) -> list[Entry | None]:
        """What every rank has written about the ``number``-th meeting, ``without`` some."""
        return [self.read(rank, number) for rank in range(self.world.size) if rank not in without]

    def last(self, rank: int) -> tuple[Entry | None, bool]:
        """The last meeting that ``rank`` has entered, and whether it is still in there."""
        row = self._row(rank)
        numbers = [NUMBER.unpack_from(self._memory, row + HEAD.size + slot * ENTRY.size)[0] for slot in range(RING)]
        entry = self.read(rank, max(numbers))
        return entry, entry is not None and entry.number > HEAD.unpack_from(self._memory, row)[0]

    @property
    def where(self) -> list[str]:
        """The places where ranks were when they last told."""
        heads = [HEAD.unpack_from(self._memory, self._row(rank)) for rank in range(self.world.size)]
        return [place.rstrip(b"\0").decode(errors="replace") for _, place in heads]

    def tell_where(self, place: str) -> None:
        """This rank is at ``place`` in its script."""
        # nothing but the place: the thread that tells it must not undo a number that the main one writes
        begin = self._mine + NUMBER.size
        self._memory[begin : begin + TEXT] = place.encode()[-TEXT:].ljust(TEXT, b"\0")

    def row(self) -> bytes:
        """All that this rank has written, for :meth:`take_row` of the others."""
        return bytes(self._memory[self._mine : self._mine + ROW])

    def take_row(self, rank: int, row: bytes) -> None:
        """What ``rank`` has written elsewhere."""
        begin = self._row(rank)
        self._memory[begin : begin + ROW] = row

    def _row(self, rank: int) -> int:
        return self._rows + rank * ROW

    def _glances(self, number: int) -> int:
        return _slot(number) * self.world.size * NUMBER.size

    def _show(self, number: int, identity: int) -> None:
        """``identity`` is what others see at a glance of this rank in the ``number``-th meeting."""
        NUMBER.pack_into(self._memory, self._glances(number) + self.world.rank * NUMBER.size, identity)


def _slot(number: int) -> int:
    """Where the entry of the ``number``-th meeting is; the ends of one part and the beginnings of the next do not meet there."""
    return number % KEPT + KEPT * ((number >> PART) % PARTS)


def _in_row(number: int) -> int:
    return HEAD.size + _slot(number) * ENTRY.size


@contextmanager
def opened(world: World, store: Any) -> Iterator[Mailbox]:
    """The mailbox of the ranks of ``world``, which find each other's by ``store``."""
    if world.on_one_node:
        yield Mailbox(world, shared_memory(store, world.rank, range(world.size), Mailbox.size(world)))
        return
    mailbox = Mailbox(world, bytearray(Mailbox.size(world)))
    with _carried(mailbox, store):
        yield mailbox


@contextmanager
def _carried(mailbox: Mailbox, store: Any) -> Iterator[None]:
    """Carry entries between nodes for as long as this is held."""
    store = store.clone()
    mine, others = mailbox.world.rank, [rank for rank in range(mailbox.world.size) if rank != mailbox.world.rank]
    store.set(f"mailbox/{mine}", bytes(ROW))

    def carry(stopped: threading.Event) -> None:
        sent, looked = b"", 0.0
        while not stopped.wait(CARRYING):
            now = mailbox.row()
            if now != sent:
                store.set(f"mailbox/{mine}", now)
                sent = now
            if mailbox.waiting or time.monotonic() > looked + LOOKING:
                looked = time.monotonic()
                for rank, row in zip(others, store.multi_get([f"mailbox/{rank}" for rank in others]), strict=True):
                    mailbox.take_row(rank, row)

    with in_background(carry, "parwrap mailbox"):
        yield
