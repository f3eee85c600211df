"""How often rank 0 has written each path, and when: rank 0 announces each write in the store, and replicas wait for it there.

A version of a path ends with each change: a close after writing, a rename onto it, its removal, a new folder. Its time is counted in sync
points, :attr:`Group.clock`, which are the same on all ranks at the same point of a script. What rank 0 did at an earlier count is in a
replica's past; what it did at the replica's own count may be in its future. Nothing here is a collective.
"""

from __future__ import annotations

import enum
import json
import os
import shutil
import tempfile
import threading
import time
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from parwrap.errors import RankMismatchError
from parwrap.group.group import Group
from parwrap.rank_zero.per_thread import passing

__all__ = ["PART", "Announced", "Awaited", "Outcome", "Record", "Saving"]

PART = ".parwrap-"
"""The prefix of temporary names that rank 0 writes to before a rename; nobody may see them."""

MOST_KEPT = 64
"""The maximum number of replaced or removed files that rank 0 keeps open for slower ranks between two sync points."""

MOST_COPIED = 2**24
"""The maximum size, in bytes, of a file of an earlier run that is copied for slower ranks when it is first written to."""

DELIVERY = 0.5
"""Seconds until a finished version is announced in the store. Replicas see immediately that rank 0 has moved on."""

SLACK = 2.0
"""Seconds by which nodes may differ about a file's modification time."""

SAVING = 1.0
"""Seconds that a replica waits to learn whether rank 0 saves to the same path, before it keeps a copy of its own save."""

AHEAD = 8
"""The number of sync points that the host of a rank with a GPU may be ahead of the others."""


@dataclass
class Record:
    """What rank 0 has done to one path.

    Attributes:
        begun: the number of versions that it has begun.
        closed: how many of them it has closed.
        clock: when the latest began.
        before: how many were closed at the last sync point before that.
        stood: whether the path existed then.
        created: when rank 0 created the path; ``None`` if it existed before the run.
        kept: replaced versions, and where rank 0's node can still read them.
        node: rank 0's node, if there are several.
        file: if there are several nodes, the inode and time that identify rank 0's file.
    """

    begun: int = 0
    closed: int = 0
    clock: int = -1
    before: int = 0
    stood: bool = False
    created: int | None = None
    kept: dict[str, str] = field(default_factory=dict)
    node: int | None = None
    file: tuple[int, float] | None = None

    def is_at(self, path: str) -> bool:
        """Whether ``path`` on this node is rank 0's file, rather than another file on a disk that the nodes do not share."""
        if self.file is None:
            return True
        with suppress(OSError), open(path, "rb") as there:  # a network file system refreshes a file's metadata when it is opened
            status = os.fstat(there.fileno())
            return status.st_ino == self.file[0] and status.st_mtime > self.file[1] - SLACK
        return False


class _Kept(NamedTuple):
    """A file held open after it was replaced: since when, and which version of which path it is."""

    clock: int
    file: int
    key: str
    version: str


class Announced:
    """Rank 0's side: announces a change before it touches a path, and again when the new version is complete.

    Args:
        group: the process group.
        topic: the prefix of its keys in the store.
    """

    def __init__(self, group: Group, topic: str) -> None:
        self._group, self._topic = group, topic
        self._node = None if group.world.on_one_node else group.world.node_rank
        self._records: dict[str, Record] = {}
        self._kept: deque[_Kept] = deque()
        self._saves: Counter[str] = Counter()
        self._lock = threading.RLock()

    def begin(self, key: str, replaces: bool, in_place: bool = False) -> None:
        """Announce that another version is about to be written.

        Args:
            key: the path.
            replaces: whether the present version disappears completely.
            in_place: whether the same file is overwritten.
        """
        now = self._group.clock
        with self._lock, passing():
            record = self._records.setdefault(key, Record(node=self._node))
            there = os.path.lexists(key)
            if record.clock < now:
                record.before, record.stood = record.closed, there
            if record.created is None and not there:
                record.created = now
            self._let_go(now)
            keeps = record.begun == record.closed and (replaces or not record.begun) and self._keep(key, record, now, copy=not replaces)
            record.begun += 1
            record.clock = now
            self._publish(key)
            self._group.store.check([self._topic])  # a round trip: the store must know before the path is touched
            if keeps and replaces and in_place:
                _renew(key)  # a replica that has opened it continues reading

    def finish(self, key: str, gone: bool = False) -> None:
        """Announce that the version is complete, or that the path is removed."""
        with self._lock:
            record = self._records[key]
            record.closed += 1
            if gone:
                record.created = None
            if self._node is not None:
                status = None if gone or not os.path.isfile(key) else os.stat(key)
                record.file = status and (status.st_ino, status.st_mtime)
            self._publish(key)

    def cancel(self, key: str) -> None:
        """Announce that the version that was begun has failed."""
        with self._lock:
            record = self._records[key]
            record.begun -= 1
            with passing():
                if not os.path.lexists(key):
                    record.created = None
            self._publish(key)

    def saves(self, place: str) -> None:
        """Record that a checkpoint is being saved at ``place`` in the script. Its version has begun."""
        with self._lock:
            self._saves[place] += 1
            self._group.store.set(f"{self._topic}/saves/{place}", str(self._saves[place]))

    def below(self, folder: str) -> list[str]:
        """The paths below ``folder`` that rank 0 has written."""
        with self._lock:
            return [key for key in self._records if key.startswith(f"{folder}/")]

    def close(self) -> None:
        """Announce that no further version will follow."""
        self._group.store.set(f"{self._topic}/ended", b"")
        while self._kept:
            os.close(self._kept.popleft().file)

    def _keep(self, key: str, record: Record, now: int, copy: bool) -> bool:
        """Keep what a slower replica has not read yet. An open file outlives its name; a file that is changed in place is copied."""
        if os.path.islink(key) or not os.path.isfile(key) or not os.access(key, os.R_OK):
            return False
        if copy and os.path.getsize(key) > MOST_COPIED:
            return False
        file = _copied(key) if copy else os.open(key, os.O_RDONLY)
        self._kept.append(_Kept(now, file, key, str(record.closed)))
        record.kept[str(record.closed)] = f"/proc/{os.getpid()}/fd/{file}"
        return True

    def _let_go(self, now: int) -> None:
        """Close kept files that are more than ``AHEAD`` sync points old, and the oldest if there are more than ``MOST_KEPT``."""
        while self._kept and (self._kept[0].clock + AHEAD < now or len(self._kept) > MOST_KEPT):
            kept = self._kept.popleft()
            del self._records[kept.key].kept[kept.version]
            self._publish(kept.key)
            os.close(kept.file)

    def _publish(self, key: str) -> None:
        self._group.store.set(f"{self._topic}/of/{key}", json.dumps(list(vars(self._records[key]).values())))


def _copied(path: str) -> int:
    """An open copy of the file at ``path``, without a name."""
    with open(path, "rb") as present, tempfile.TemporaryFile() as copy:
        shutil.copyfileobj(present, copy)
        copy.flush()
        return os.dup(copy.fileno())


def _renew(path: str) -> None:
    """Replace the file at ``path`` by an empty one, so that the path always exists."""
    with suppress(OSError):
        file, temporary = tempfile.mkstemp(prefix=PART, dir=os.path.dirname(path))
        os.close(file)
        shutil.copymode(path, temporary)
        os.replace(temporary, path)


class Outcome(enum.Enum):
    """The state of a version that a replica waits for."""

    THERE = "the replica should read rank 0's file"
    REPLACED = "rank 0 has moved on to a later one"
    NEVER = "rank 0 has passed this point without it"


class Saving(enum.Enum):
    """How rank 0 saves a checkpoint that a replica saves."""

    SAME = "to the same path"
    OTHERWISE = "to another path, for example because its name contains the time or a random number"
    UNKNOWN = "not at all so far"


class Awaited:
    """A replica's side: looks up rank 0's announcements and waits for them.

    Args:
        group: the process group.
        topic: the prefix of the keys in the store.
    """

    def __init__(self, group: Group, topic: str) -> None:
        self._group, self._topic, self._store = group, topic, group.store
        self.apart, self._node = not group.world.on_one_node, group.world.node_rank

    @property
    def clock(self) -> int:
        """The number of sync points that this rank has passed."""
        return self._group.clock

    def record(self, key: str) -> Record | None:
        """Rank 0's record of the path so far."""
        name = f"{self._topic}/of/{key}"
        if not self._store.check([name]):
            return None
        record = Record(*json.loads(self._store.get(name)))
        if self.apart and record.node != self._node:
            record.kept = {}
        else:
            record.file = None
        return record

    def before(self, key: str) -> int:
        """The number of versions that existed at this rank's last sync point."""
        record = self.record(key)
        if record is None:
            return 0
        return record.closed if record.clock < self.clock else record.before

    def present(self, key: str) -> str | None:
        """Where to read a path that only rank 0 may have changed; ``None`` if it exists only because rank 0 is ahead.

        Raises:
            RankMismatchError: the file is not the one that rank 0 has written on its own node.
        """
        there = os.path.lexists(key)  # before the record is read, because rank 0 announces a path before it creates it
        record = self.record(key)
        if record and os.path.lexists(key) and not record.is_at(key):
            raise RankMismatchError(
                f"rank 0 has written {key} on its own node, but this node has a different file of that name. Put it on a disk that the "
                "nodes share, or write it on every rank: `with parwrap.every_rank_writes():`."
            )
        if record is None or record.clock < self.clock:
            return key if there else None
        # ``created`` is lost when rank 0 removes its own file, and changes when it creates the file again
        if not record.stood if record.clock == self.clock else record.created is not None and record.created >= self.clock:
            return None
        return record.kept.get(str(record.before)) or (key if os.path.lexists(key) else None)

    def removed_ahead(self, key: str) -> bool:
        """Whether the path does not exist only because rank 0 is ahead."""
        record = self.record(key)
        return record is not None and record.stood and record.clock >= self.clock

    def replaced(self, key: str, version: int, own: int) -> bool:
        """Whether rank 0 has begun a later version than :meth:`wait` would wait for."""
        record = self.record(key)
        return record is not None and self._replaced(record, self._wanted(record, version, own))

    def wait(self, key: str, version: int, own: int, needs_it: bool = False) -> tuple[Outcome, Record, int]:
        """Wait until rank 0 has closed ``version`` of the path, or never will.

        Args:
            key: the path.
            version: the version, as this rank counts.
            own: how many versions this rank has closed since its last sync point.
            needs_it: whether there is nothing else to read. If rank 0 has not written the path at all, this rank has left the loop that
                rank 0 is in, and answers rank 0 until it writes.

        The version's state, rank 0's record, and the version's number as rank 0 counts.

        Raises:
            RankMismatchError: neither has happened within the group's timeout.
        """
        record, outcome = Record(), None
        passed: float | None = None
        in_order = threading.current_thread() is threading.main_thread()  # a thread of rank 0 may write after its main thread has passed

        def settled() -> bool:
            nonlocal record, outcome, passed
            if passed is None and self._passed():
                passed = time.monotonic()
            record = self.record(key) or Record()  # after that read: rank 0 begins a version before it passes
            wanted = self._wanted(record, version, own)
            if self._replaced(record, wanted):
                outcome = Outcome.REPLACED
            elif record.closed >= wanted:
                outcome = Outcome.THERE
            elif passed is not None and ((record.begun < wanted and in_order) or time.monotonic() > passed + DELIVERY):
                outcome = Outcome.NEVER
            return outcome is not None

        self._group.wait_until(settled, 0, f"version {version} of {key}")
        while needs_it and outcome is Outcome.NEVER and not record.closed and self._group.coordinator.answer_next(0):
            outcome = passed = None
            self._group.wait_until(settled, 0, f"version {version} of {key}")
        assert outcome is not None
        return outcome, record, self._wanted(record, version, own) if outcome is Outcome.REPLACED else record.closed

    def saving(self, key: str, version: int, own: int, place: str, number: int) -> Saving:
        """How rank 0 saves what this rank saves to the path as ``version``: the ``number``-th time at ``place`` in the script."""
        outcome, until = Saving.UNKNOWN, time.monotonic() + SAVING
        name = f"{self._topic}/saves/{place}"

        def known() -> bool:
            nonlocal outcome
            over = time.monotonic() > until or self._passed()
            saves = int(self._store.get(name)) if self._store.check([name]) else 0
            record = self.record(key) or Record()  # after those reads: rank 0 begins a version before it counts or passes
            if record.begun >= self._wanted(record, version, own):
                outcome = Saving.SAME
            elif saves >= number:
                outcome = Saving.OTHERWISE
            return over or outcome is not Saving.UNKNOWN

        self._group.wait_until(known, 0, f"a checkpoint at {key}")
        return outcome

    def _passed(self) -> bool:
        """Whether rank 0 has passed this rank's point of the script."""
        return self._group.coordinator.passed(0) or self._store.check([f"{self._topic}/ended"])

    def _wanted(self, record: Record, version: int, own: int) -> int:
        """Count versions as rank 0 does, because its own numbers may make it write more often.

        Its record has the count at the last sync point.
        """
        return max(version, record.before + own) if record.clock >= self.clock else version

    def _replaced(self, record: Record, version: int) -> bool:
        """Whether rank 0 has begun a later version since this rank's last sync point."""
        return record.begun > version and record.clock >= self.clock
