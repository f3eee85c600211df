"""How often rank 0 has written each path and when: announced in the store by rank 0, awaited there by the clones.

A version of a path is whatever makes it another: a close after writing, a rename onto it, its removal, a folder made. *When* is
counted in meetings of the ranks, :attr:`Group.clock`, which is the same on all ranks at the same point of a script: what rank 0
did at an earlier count lies in a clone's past, and what it did at the clone's own may be in its future. Nothing here is a
collective.
"""

from __future__ import annotations

import enum
import json
import os
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import astuple, dataclass, field

from parwrap.files.places import passing
from parwrap.group import Group

__all__ = ["Announced", "Awaited", "Outcome", "Record"]

MOST_KEPT = 64
"""How many files that have been replaced or removed rank 0 holds open for slower ranks, between two meetings."""

IMPATIENCE = 0.05
"""Seconds after which a clone asks whether rank 0 has passed the point where it waits."""


@dataclass
class Record:
    """What rank 0 has done to one path.

    Attributes:
        begun: how many versions it has begun.
        closed: how many of them are there.
        clock: when the latest began.
        before: how many were there when the ranks had last met before that.
        created: when rank 0 made what was not there before; ``None`` for what was.
        kept: versions that have been replaced, and from where they can still be read.
    """

    begun: int = 0
    closed: int = 0
    clock: int = -1
    before: int = 0
    created: int | None = None
    kept: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Kept:
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
        self._records: dict[str, Record] = {}
        self._kept: deque[_Kept] = deque()
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
            record = self._records.setdefault(key, Record())
            self._let_go(now)
            if replaces and (record.closed or not in_place) and record.begun == record.closed and _is_file(key):
                self._keep(key, record, now)
                if in_place:
                    with suppress(OSError):
                        os.unlink(key)  # a clone that has opened it reads on
            if record.clock < now:
                record.before = record.closed
            if record.created is None and not _there(key):
                record.created = now
            record.begun += 1
            record.clock = now
            self._tell(key)

    def finish(self, key: str, gone: bool = False) -> None:
        """The version is there, or the path is gone."""
        with self._lock:
            record = self._records[key]
            record.closed += 1
            if gone:
                record.created = None
            self._tell(key)

    def cancel(self, key: str) -> None:
        """The version that was begun has failed."""
        with self._lock:
            record = self._records[key]
            record.begun -= 1
            if record.begun == 0 and not _there(key):
                record.created = None
            self._tell(key)

    def below(self, folder: str) -> list[str]:
        """The paths below ``folder`` that rank 0 has written."""
        with self._lock:
            return [key for key in self._records if key.startswith(f"{folder}/")]

    def close(self, waits: bool) -> None:
        """No further version will come; ``waits`` for clones that may still read what has been replaced."""
        self._group.store.set(f"{self._topic}/ended", b"")
        self._let_go(self._group.clock)
        for rank in range(1, self._group.world.size) if waits and self._kept else ():
            self._group.fetch(f"{self._topic}/through/{rank}", rank, "the end of what reads files that rank 0 has replaced")
        while self._kept:
            os.close(self._kept.popleft().file)

    def _keep(self, key: str, record: Record, now: int) -> None:
        """Keep what a clone that is slower has not read yet: an open file stays when its name goes."""
        file = os.open(key, os.O_RDONLY)
        self._kept.append(_Kept(now, file, key, str(record.closed)))
        record.kept[str(record.closed)] = f"/proc/{os.getpid()}/fd/{file}"

    def _let_go(self, now: int) -> None:
        """Close what all ranks have had the time to read, since they have met."""
        while self._kept and (self._kept[0].clock < now or len(self._kept) > MOST_KEPT):
            kept = self._kept.popleft()
            del self._records[kept.key].kept[kept.version]
            self._tell(kept.key)
            os.close(kept.file)

    def _tell(self, key: str) -> None:
        self._group.store.set(f"{self._topic}/of/{key}", json.dumps(astuple(self._records[key])))


def _there(path: str) -> bool:
    with passing():
        return os.path.lexists(path)


def _is_file(path: str) -> bool:
    """Whether a file of its own has this name, not a link."""
    return os.path.isfile(path) and not os.path.islink(path)


class Outcome(enum.Enum):
    """What has become of a version that a clone waits for."""

    THERE = "rank 0's file is what the clone should see"
    REPLACED = "rank 0 has gone on to a later one"
    NEVER = "rank 0 has passed this point without it"


class Awaited:
    """A clone's side: looks up what rank 0 has announced, and waits for it.

    Args:
        group: the process group.
        topic: what all keys in the store begin with.
    """

    def __init__(self, group: Group, topic: str) -> None:
        self._group, self._topic, self._store = group, topic, group.store

    def record(self, key: str) -> Record | None:
        """What rank 0 has done to the path so far."""
        name = f"{self._topic}/of/{key}"
        return Record(*json.loads(self._store.get(name))) if self._store.check([name]) else None

    def before(self, key: str) -> int:
        """How many versions there were when this rank last met the others."""
        record = self.record(key)
        if record is None:
            return 0
        return record.closed if record.clock < self._group.clock else record.before

    def hidden(self, key: str) -> bool:
        """Whether the path is there only since rank 0 is ahead."""
        record = self.record(key)
        return record is not None and record.created is not None and record.created >= self._group.clock

    def removed_ahead(self, key: str) -> bool:
        """Whether the path is not there only since rank 0 is ahead."""
        record = self.record(key)
        return record is not None and record.created is None and record.clock >= self._group.clock

    def replaced(self, key: str, version: int) -> bool:
        """Whether rank 0 has begun a later version that a clone must not see."""
        return self._replaced(self.record(key), version)

    def wait(self, key: str, version: int) -> tuple[Outcome, Record]:
        """Until rank 0 has closed ``version`` of the path, or will not any more.

        Raises:
            RankMismatchError: neither has happened within the group's timeout.
        """
        record = Record()
        outcome = None
        answer = ""
        began = time.monotonic()

        def settled() -> bool:
            nonlocal record, outcome, answer
            # asked first: what rank 0 has announced before it has passed is there
            passed = answer and any(self._store.check([name]) for name in (answer, f"{self._topic}/ended"))
            record = self.record(key) or Record()
            if self._replaced(record, version):
                outcome = Outcome.REPLACED
            elif record.closed >= version:
                outcome = Outcome.THERE
            elif passed:
                outcome = Outcome.NEVER
            elif not answer and time.monotonic() - began > IMPATIENCE:
                answer = self._ask()
            return outcome is not None

        self._group.wait_until(settled, 0, f"version {version} of {key}")
        assert outcome is not None
        return outcome, record

    def close(self) -> None:
        """This rank will read nothing more."""
        self._store.set(f"{self._topic}/through/{self._group.world.rank}", b"")

    def _replaced(self, record: Record | None, version: int) -> bool:
        return record is not None and record.begun > version and record.clock >= self._group.clock

    def _ask(self) -> str:
        """Ask rank 0 whether it has met the others more often than this rank; the key of its answer."""
        number = self._store.add(f"{self._topic}/questions", 1)
        self._store.set(f"{self._topic}/question/{number}", str(self._group.clock))
        return f"{self._topic}/answer/{number}"
