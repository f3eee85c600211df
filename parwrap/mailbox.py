"""Who is where: before a rank meets the others it writes down, where all ranks can read it, which meeting it enters.

A meeting is anything that ranks do together: a backward, a reduction, the end. Every rank has a short ring of entries of its
own, one for each meeting, in a memory that the ranks of one node share; across nodes a thread carries it through the store.
Writing costs microseconds and no collective. What follows from the entries is decided in ``meetings.py``.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np

from parwrap.world import World

__all__ = ["PART", "Entry", "Mailbox", "Meeting", "State", "opened", "shared_memory"]

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

ENTRY = np.dtype(
    [
        ("number", "<i8"),
        ("identity", "<i8"),
        ("detail", "<i8"),
        ("since", "<f8"),
        ("state", "u1"),
        ("stale", "?"),
        ("astray", "?"),
        ("text", f"S{TEXT}"),
    ],
    align=True,
)
ROW = np.dtype([("done", "<i8"), ("where", f"S{TEXT}"), ("ring", ENTRY, RING)], align=True)
GLANCE = np.dtype("<i8")


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
    """

    kind: str
    place: str = ""
    detail: int = 0
    identity: int = field(init=False, compare=False)
    text: bytes = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "identity", zlib.crc32(f"{self.kind}/{self.detail}".encode()))
        # a path is known by its end
        room = TEXT - len(self.kind) - 1
        object.__setattr__(self, "text", self.kind.encode() + b"\n" + self.place.encode()[-room:])

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
        self._rows = np.frombuffer(memory, dtype=ROW, count=world.size)
        ring = self._rows["ring"]
        self._numbers, self._identities, self._astray = ring["number"], ring["identity"], ring["astray"]
        self._ring, self._my_numbers = ring[world.rank], self._numbers[world.rank]
        self._done = self._rows["done"][world.rank : world.rank + 1]
        # what is looked at after each backward lies together, so that one comparison of bytes does
        self._glances = np.frombuffer(memory, dtype=GLANCE, offset=world.size * ROW.itemsize).reshape(RING, world.size)
        self._my_glances = self._glances[:, world.rank]
        self._expected = 0, b""

    @staticmethod
    def size(world: World) -> int:
        """The bytes that the entries of all ranks take."""
        return world.size * (ROW.itemsize + RING * GLANCE.itemsize)

    def write(self, number: int, meeting: Meeting, state: State, stale: bool = False) -> None:
        """Enter the ``number``-th meeting."""
        slot = _slot(number)
        # with no number at first: nobody is to read it half written
        self._ring[slot] = (0, meeting.identity, meeting.detail, time.time(), state, stale, False, meeting.text)
        self._my_numbers[slot] = number
        self._my_glances[slot] = meeting.identity if state is State.CONTRIBUTING else 0
        self.written = number, meeting

    def take_back(self, number: int) -> None:
        """This rank does not come to the ``number``-th meeting, if it has entered that."""
        if self.written and self.written[0] == number:
            self._my_numbers[_slot(number)] = 0
            self.written = None

    def done(self, number: int) -> None:
        """This rank is through with the ``number``-th meeting."""
        self._done[0] = number

    def behind(self, number: int) -> bool:
        """Whether a rank is not through yet with the ``number``-th meeting."""
        return bool((self._rows["done"] < number).any())

    def agreed(self, number: int, meeting: Meeting) -> bool:
        """Whether no rank is known to be in another meeting with that number."""
        slot = _slot(number)
        come = self._numbers[:, slot] == number  # looked at first, since it is written last
        return bool((self._identities[:, slot] == meeting.identity)[come].all())

    def regular(self, number: int, meeting: Meeting) -> bool:
        """Whether all ranks, known to have come to the ``number``-th meeting, went ahead to ``meeting`` with nothing to tell.

        Across nodes this is not known at once, and ``False``.
        """
        if self._expected[0] != meeting.identity:
            self._expected = meeting.identity, meeting.identity.to_bytes(GLANCE.itemsize, "little") * self.world.size
        return self._glances[_slot(number)].tobytes() == self._expected[1]

    def tell(self, number: int) -> None:
        """This rank has something to tell in the ``number``-th meeting."""
        self._my_glances[_slot(number)] = 0

    def go_astray(self, number: int) -> None:
        """In the ``number``-th meeting, this rank does something else than was expected of it."""
        self._ring["astray"][_slot(number)] = True
        self.tell(number)

    def any_astray(self, number: int) -> bool:
        """Whether a rank has gone astray in the ``number``-th meeting, which is over."""
        return bool(self._astray[:, _slot(number)].any())

    def read(self, rank: int, number: int) -> Entry | None:
        """What ``rank`` has written about the ``number``-th meeting, if it has come there."""
        ring = self._rows[rank]["ring"]
        entry = ring[_slot(number)].copy()
        if not number or entry["number"] != number or ring[_slot(number)]["number"] != number:
            return None
        kind, _, place = bytes(entry["text"]).decode(errors="replace").partition("\n")
        return Entry(
            rank, number, Meeting(kind, place, int(entry["detail"])), State(entry["state"]), bool(entry["stale"]), float(entry["since"])
        )

    def read_all(self, number: int) -> list[Entry | None]:
        """What every rank has written about the ``number``-th meeting."""
        return [self.read(rank, number) for rank in range(self.world.size)]

    def last(self, rank: int) -> tuple[Entry | None, bool]:
        """The last meeting that ``rank`` has entered, and whether it is still in there."""
        row = self._rows[rank]
        entry = self.read(rank, int(row["ring"]["number"].max()))
        return entry, entry is not None and entry.number > row["done"]

    @property
    def where(self) -> list[str]:
        """The places where ranks were when they last told."""
        return [bytes(place).decode(errors="replace") for place in self._rows["where"]]

    def tell_where(self, place: str) -> None:
        """This rank is at ``place`` in its script."""
        self._rows[self.world.rank]["where"] = place.encode()[-TEXT:]


def _slot(number: int) -> int:
    """Where the entry of the ``number``-th meeting is; the ends of one part and the beginnings of the next do not meet there."""
    return number % KEPT + KEPT * ((number >> PART) % PARTS)


@contextmanager
def opened(world: World, store: Any) -> Iterator[Mailbox]:
    """The mailbox of the ranks of ``world``, which find each other's by ``store``."""
    if world.local_size == world.size:
        yield Mailbox(world, shared_memory(world, store, Mailbox.size(world)))
        return
    mailbox = Mailbox(world, bytearray(Mailbox.size(world)))
    with _carried(mailbox, store):
        yield mailbox


def shared_memory(world: World, store: Any, size: int) -> mmap.mmap:
    """Memory of ``size`` bytes, all 0, that the ranks of one node share; its file has no name any more when this returns."""
    if world.rank == 0:
        fast = "/dev/shm" if os.path.isdir("/dev/shm") else None
        file, path = tempfile.mkstemp(prefix="parwrap-", dir=fast)
        os.truncate(file, size)
        store.set("mailbox", path)
        memory = mmap.mmap(file, size)
        os.close(file)
        store.wait([f"mailbox/{rank}" for rank in range(1, world.size)])
        os.unlink(path)
        return memory
    with open(store.get("mailbox"), "r+b") as shared:
        memory = mmap.mmap(shared.fileno(), size)
    store.set(f"mailbox/{world.rank}", b"")
    return memory


@contextmanager
def _carried(mailbox: Mailbox, store: Any) -> Iterator[None]:
    """Carry entries between nodes for as long as this is held."""
    store, stopped = store.clone(), threading.Event()
    mine, others = mailbox.world.rank, [rank for rank in range(mailbox.world.size) if rank != mailbox.world.rank]
    store.set(f"mailbox/{mine}", bytes(ROW.itemsize))

    def carry() -> None:
        sent, looked = b"", 0.0
        while not stopped.wait(CARRYING):
            now = mailbox._rows[mine].tobytes()
            if now != sent:
                store.set(f"mailbox/{mine}", now)
                sent = now
            if mailbox.waiting or time.monotonic() > looked + LOOKING:
                looked = time.monotonic()
                for rank, row in zip(others, store.multi_get([f"mailbox/{rank}" for rank in others]), strict=True):
                    mailbox._rows[rank] = np.frombuffer(row, dtype=ROW)[0]

    thread = threading.Thread(target=carry, name="parwrap mailbox", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
