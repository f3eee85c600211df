"""How often rank 0 has written each path and when: announced in the store by rank 0, awaited there by the clones.

A version of a path is whatever makes it another: a close after writing, a rename onto it, its removal, a folder made. *When* is
counted in sync points of the ranks, :attr:`Group.clock`, which is the same on all ranks at the same point of a script: what rank 0
did at an earlier count lies in a clone's past, and what it did at the clone's own may be in its future. Nothing here is a
collective.
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
"""What the names begin with under which rank 0 writes what is renamed when it is ready; nobody is to see them."""

MOST_KEPT = 64
"""How many files that have been replaced or removed rank 0 holds open for slower ranks, between two sync points."""

MOST_COPIED = 2**24
"""The bytes of a file of an earlier run that is copied for slower ranks when it is first written to."""

DELIVERY = 0.5
"""Seconds in which word of a finished version reaches the store; that rank 0 has gone on is seen at once."""

SLACK = 2.0
"""Seconds by which nodes may differ about when a file was changed."""

SAVING = 1.0
"""Seconds that a clone waits to learn whether rank 0 saves to the same path, before it keeps a copy of what it saves."""

AHEAD = 8
"""How many sync points the host of a rank with a GPU may be ahead of the others."""


@dataclass
class Record:
    """What rank 0 has done to one path.

    Attributes:
        begun: how many versions it has begun.
        closed: how many of them are there.
        clock: when the latest began.
        before: how many were there when the ranks had last met before that.
        stood: whether the path was there then.
        created: when rank 0 made what was not there before; ``None`` for what was.
        kept: versions that have been replaced, and from where they can still be read, on rank 0's node.
        node: if there are several, rank 0's.
        file: if there are several nodes, what tells rank 0's file from another: its number on the disk, and when it was changed.
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
        """Whether what is at ``path`` on this node is rank 0's, and not another file, on a disk that rank 0 does not share."""
        if self.file is None:
            return True
        with suppress(OSError), open(path, "rb") as there:  # a network's file system looks anew when a file is opened
            status = os.fstat(there.fileno())
            return status.st_ino == self.file[0] and status.st_mtime > self.file[1] - SLACK
        return False


class _Kept(NamedTuple):
    """A file that is held open though it has been replaced: since when, and which version of which path it is."""

    clock: int
    file: int
    key: str
    version: str


class Announced:
    """Rank 0's side: announces before a path is touched, and when its new version is there.

    Args:
        group: the process group.
        topic: what all its keys in the store begin with.
    """

    def __init__(self, group: Group, topic: str) -> None:
        self._group, self._topic = group, topic
        self._node = None if group.world.on_one_node else group.world.node_rank
        self._records: dict[str, Record] = {}
        self._kept: deque[_Kept] = deque()
        self._saves: Counter[str] = Counter()
        self._lock = threading.RLock()

    def begin(self, key: str, replaces: bool, in_place: bool = False) -> None:
        """Another version is about to be written.

        Args:
            key: the path.
            replaces: nothing of the present version will be left.
            in_place: the same file is written anew.
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
            self._tell(key)
            self._group.store.check([self._topic])  # a round trip: the path is touched after the store knows
            if keeps and replaces and in_place:
                _renew(key)  # a clone that has opened it reads on

    def finish(self, key: str, gone: bool = False) -> None:
        """The version is there, or the path is gone."""
        with self._lock:
            record = self._records[key]
            record.closed += 1
            if gone:
                record.created = None
            if self._node is not None:
                status = None if gone or not os.path.isfile(key) else os.stat(key)
                record.file = status and (status.st_ino, status.st_mtime)
            self._tell(key)

    def cancel(self, key: str) -> None:
        """The version that was begun has failed."""
        with self._lock:
            record = self._records[key]
            record.begun -= 1
            with passing():
                if not os.path.lexists(key):
                    record.created = None
            self._tell(key)

    def saves(self, place: str) -> None:
        """Another checkpoint is being saved at ``place`` in the script; its version has begun."""
        with self._lock:
            self._saves[place] += 1
            self._group.store.set(f"{self._topic}/saves/{place}", str(self._saves[place]))

    def below(self, folder: str) -> list[str]:
        """The paths below ``folder`` that rank 0 has written."""
        with self._lock:
            return [key for key in self._records if key.startswith(f"{folder}/")]

    def close(self) -> None:
        """No further version will come."""
        self._group.store.set(f"{self._topic}/ended", b"")
        while self._kept:
            os.close(self._kept.popleft().file)

    def _keep(self, key: str, record: Record, now: int, copy: bool) -> bool:
        """Keep what a clone that is slower has not read yet: an open file stays when its name goes; what changes is copied."""
        if os.path.islink(key) or not os.path.isfile(key) or not os.access(key, os.R_OK):
            return False
        if copy and os.path.getsize(key) > MOST_COPIED:
            return False
        file = _copied(key) if copy else os.open(key, os.O_RDONLY)
        self._kept.append(_Kept(now, file, key, str(record.closed)))
        record.kept[str(record.closed)] = f"/proc/{os.getpid()}/fd/{file}"
        return True

    def _let_go(self, now: int) -> None:
        """Close what all ranks have had the time to read, since they have met."""
        while self._kept and (self._kept[0].clock + AHEAD < now or len(self._kept) > MOST_KEPT):
            kept = self._kept.popleft()
            del self._records[kept.key].kept[kept.version]
            self._tell(kept.key)
            os.close(kept.file)

    def _tell(self, key: str) -> None:
        self._group.store.set(f"{self._topic}/of/{key}", json.dumps(list(vars(self._records[key]).values())))


def _copied(path: str) -> int:
    """An open copy of the file at ``path``, without a name."""
    with open(path, "rb") as present, tempfile.TemporaryFile() as copy:
        shutil.copyfileobj(present, copy)
        copy.flush()
        return os.dup(copy.fileno())


def _renew(path: str) -> None:
    """Put an empty file in the place of that at ``path``, which is there all the time."""
    with suppress(OSError):
        file, beside = tempfile.mkstemp(prefix=PART, dir=os.path.dirname(path))
        os.close(file)
        shutil.copymode(path, beside)
        os.replace(beside, path)


class Outcome(enum.Enum):
    """What has become of a version that a clone waits for."""

    THERE = "rank 0's file is what the clone should see"
    REPLACED = "rank 0 has gone on to a later one"
    NEVER = "rank 0 has passed this point without it"


class Saving(enum.Enum):
    """How rank 0 saves the checkpoint that a clone saves."""

    SAME = "to the same path"
    OTHERWISE = "to another path, as where the name holds the time or a random number"
    UNKNOWN = "not at all so far"


class Awaited:
    """A clone's side: looks up what rank 0 has announced, and waits for it.

    Args:
        group: the process group.
        topic: what all keys in the store begin with.
    """

    def __init__(self, group: Group, topic: str) -> None:
        self._group, self._topic, self._store = group, topic, group.store
        self.apart, self._node = not group.world.on_one_node, group.world.node_rank

    @property
    def clock(self) -> int:
        """How often this rank has met the others."""
        return self._group.clock

    def record(self, key: str) -> Record | None:
        """What rank 0 has done to the path so far."""
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
        """How many versions there were when this rank last met the others."""
        record = self.record(key)
        if record is None:
            return 0
        return record.closed if record.clock < self.clock else record.before

    def present(self, key: str) -> str | None:
        """Where to read a path that this rank has not changed and rank 0 may have; ``None`` if it is there only since rank 0 is ahead.

        Raises:
            RankMismatchError: what is there is not what rank 0 has written on its own node.
        """
        there = os.path.lexists(key)  # before the look at the record: rank 0 announces a path before it makes it
        record = self.record(key)
        if record and os.path.lexists(key) and not record.is_at(key):
            raise RankMismatchError(
                f"rank 0 has written {key} on its own node, and the file of that name on this node is another one. "
                "Put it on a disk that the nodes share, or have every rank write it: `with parwrap.every_rank_writes():`."
            )
        if record is None or record.clock < self.clock:
            return key if there else None
        # created is lost when rank 0 removes what it has made, and another when it makes it again
        if not record.stood if record.clock == self.clock else record.created is not None and record.created >= self.clock:
            return None
        return record.kept.get(str(record.before)) or (key if os.path.lexists(key) else None)

    def removed_ahead(self, key: str) -> bool:
        """Whether the path is not there only since rank 0 is ahead."""
        record = self.record(key)
        return record is not None and record.stood and record.clock >= self.clock

    def replaced(self, key: str, version: int, own: int) -> bool:
        """Whether rank 0 has begun a later version than :meth:`wait` would wait for."""
        record = self.record(key)
        return record is not None and self._replaced(record, self._wanted(record, version, own))

    def wait(self, key: str, version: int, own: int, needs_it: bool = False) -> tuple[Outcome, Record, int]:
        """Until rank 0 has closed ``version`` of the path, or will not any more.

        Args:
            key: the path.
            version: by this rank's count.
            own: how many of them this rank has closed since it last met the others.
            needs_it: there is nothing else to read. If rank 0 has not written the path at all, this rank has left the loop that rank 0
                is in, and answers it until it comes.

        Returns:
            What has become of it, rank 0's record, and the number of the version by rank 0's count.

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
            record = self.record(key) or Record()  # after that look: rank 0 begins a version before it passes
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
            record = self.record(key) or Record()  # after those looks: rank 0 begins a version before it counts or passes
            if record.begun >= self._wanted(record, version, own):
                outcome = Saving.SAME
            elif saves >= number:
                outcome = Saving.OTHERWISE
            return over or outcome is not Saving.UNKNOWN

        self._group.wait_until(known, 0, f"a checkpoint at {key}")
        return outcome

    def _passed(self) -> bool:
        """Whether rank 0 has passed the point of the script where this rank is."""
        return self._group.coordinator.passed(0) or self._store.check([f"{self._topic}/ended"])

    def _wanted(self, record: Record, version: int, own: int) -> int:
        """Rank 0 may have written more often, by its own numbers: the versions before the last sync point are then known from it."""
        return max(version, record.before + own) if record.clock >= self.clock else version

    def _replaced(self, record: Record, version: int) -> bool:
        """Whether rank 0 has begun a later one since this rank last met the others."""
        return record.begun > version and record.clock >= self.clock
