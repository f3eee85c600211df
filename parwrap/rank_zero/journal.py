"""What the first rank of a node tells the others about files: a journal in the folder that the ranks of the node share.

The first rank writes a line only if another rank could otherwise see something different: where a checkpoint was saved, which folders are
made, what is about to be replaced, moved or removed, and when the first rank ran something alone. The other ranks read the new lines when
they look at a recent path.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parwrap.places import is_ours, is_standard
from parwrap.rank_zero.path_rules import ancestors, is_inside
from parwrap.ranks.platform import OPEN_OWN, read_at, shared_memory

__all__ = ["NOT_KEPT", "ROUNDING", "Ahead", "Journal", "JournalReader", "Progress", "Sites", "earliest_time", "moved_path", "wait_for_tick"]

CLOCK_REALTIME_COARSE = 5
"""The number of the clock in Linux; the module ``time`` does not name it."""

ROUNDING = 1e-5
"""Seconds by which the time of a file may differ from the clock, because of rounding."""

NOT_KEPT = "not-kept"
"""The name of a folder that does not exist. The journal names a path in it for a file whose old content is lost."""


def earliest_time() -> float:
    """The earliest time that a file which changes now can have; ``time.time()`` is the latest. Linux uses a clock that ticks slowly."""
    return time.clock_gettime(CLOCK_REALTIME_COARSE) if sys.platform == "linux" else time.time()


def wait_for_tick(since: float) -> None:
    """Wait until a file that changes from then on gets a later time than ``since``: a few milliseconds if ``since`` is the present."""
    while earliest_time() <= since + 2 * ROUNDING:
        time.sleep(0.0005)


class Sites:
    """Numbers the calls at each line of the script or of a library. Ranks agree on the numbers, even if one calls more at another line."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._lock = threading.Lock()

    def next(self) -> str:
        """Count a call at the running line of the script or of a library, and return its name: ``file:line #number``."""
        frame = sys._getframe(1)
        while frame.f_back is not None and (is_ours(frame.f_code.co_filename) or is_standard(frame.f_code.co_filename)):
            frame = frame.f_back
        site = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        with self._lock:
            self._calls[site] += 1
            return f"{site} #{self._calls[site]}"


class Journal:
    """Writes the journal of a node. Only the first rank of the node has one.

    Args:
        folder: the folder that the ranks of the node share.
    """

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / "journal", os.O_WRONLY | os.O_APPEND | os.O_CREAT | OPEN_OWN, 0o600)

    def saved(self, save: str, place: str) -> None:
        """Record that ``save``, a name from :class:`Sites`, can be read at ``place``."""
        self._add("saved", save, place)

    def makes(self, folder: str) -> None:
        """Record that ``folder`` did not exist and is about to be made."""
        self._add("makes", folder)

    def replaces(self, path: str, before: str) -> None:
        """Record that ``path`` is about to change. Other ranks read its old content at ``before``, which is empty for a folder."""
        self._add("replaces", path, before)

    def moves(self, folder: str, to: str) -> None:
        """Record that ``folder`` is about to be moved to the path ``to``."""
        self._add("moves", folder, to)

    def ran_alone(self, call: str, since: float) -> None:
        """Record that ``call``, a name from :class:`Sites` for what only this rank runs, began at the time ``since`` and ended now."""
        self._add("ran alone", call, since)

    def crossed(self) -> None:
        """Record that this rank has passed a barrier: the other ranks see what was there until now."""
        self._add("crossed")

    def close(self) -> None:
        """Record that this rank writes no more, and close the journal."""
        self._add("ended")
        os.close(self._file)

    def _add(self, *line: Any) -> None:
        os.write(self._file, json.dumps([time.time(), *line]).encode() + b"\n")


@dataclass
class Ahead:
    """What the first rank has changed since a barrier.

    Attributes:
        made: the folders that it has begun to make.
        before: for each path that existed and has changed, where to read its old content; empty for a folder. A path is named as it was
            before folders moved.
        moved: for each folder that existed and was moved, where it is now.
    """

    made: set[str] = field(default_factory=set)
    before: dict[str, str] = field(default_factory=dict)
    moved: dict[str, str] = field(default_factory=dict)

    def replaces(self, path: str, before: str) -> None:
        """Note that the first rank is about to change ``path``."""
        self.before.setdefault(self._before_moves(path), before)

    def moves(self, folder: str, to: str) -> None:
        """Note that the first rank is about to move ``folder`` to the path ``to``."""
        if folder not in self.made or folder in self.moved.values():  # it existed
            self.moved.setdefault(self._before_moves(folder), folder)
        self.moved = {path: moved_path(place, folder, to) for path, place in self.moved.items()}
        self.made |= {moved_path(path, folder, to) for path in self.made}

    def place(self, path: str) -> str | None:
        """Where ``path`` is now if it, or a folder above it, was moved; otherwise ``None``."""
        folder = next((each for each in (path, *ancestors(path)) if each in self.moved), None) if self.moved else None
        return None if folder is None else moved_path(path, folder, self.moved[folder])

    def _before_moves(self, path: str) -> str:
        for before, place in self.moved.items():
            if path == place or is_inside(path, place):
                return moved_path(path, place, before)
        return path


class JournalReader:
    """Reads the journal in ``folder``.

    Attributes:
        saves: where to read each saved file, by the name of its save.
        barriers: when the first rank passed each barrier.
        alone: when each call that the first rank ran alone began and ended, by the name of the call.
        ended: whether the first rank writes no more.
    """

    def __init__(self, folder: Path) -> None:
        self.saves: dict[str, str] = {}
        self.barriers: list[float] = []
        self.alone: dict[str, tuple[float, float]] = {}
        self.ended = False
        self._since_barrier: defaultdict[int, Ahead] = defaultdict(Ahead)
        self._own_barriers = 0
        self._file = os.open(folder / "journal", os.O_RDONLY | os.O_CREAT | OPEN_OWN, 0o600)
        self._read = 0
        self._lock = threading.Lock()

    @property
    def ahead(self) -> Ahead:
        """What the first rank has changed since the last barrier of this rank, as far as this rank has read."""
        return self._since_barrier[self._own_barriers]

    def update(self) -> JournalReader:
        """Read the lines that are new, and return this reader."""
        with self._lock:
            new = os.fstat(self._file).st_size - self._read
            if new > 0:
                text = read_at(self._file, new, self._read)
                whole = text[: text.rfind(b"\n") + 1]
                self._read += len(whole)
                for line in whole.splitlines():
                    self._take(*json.loads(line))
        return self

    def crossed(self) -> int:
        """Forget what the first rank changed before the barrier that this rank has passed. Returns the number of barriers so far."""
        self._since_barrier.pop(self._own_barriers, None)
        self._own_barriers += 1
        return self._own_barriers

    def close(self) -> None:
        os.close(self._file)

    def _take(self, when: float, kind: str, *what: Any) -> None:
        ahead = self._since_barrier[len(self.barriers)]
        if kind == "saved":
            self.saves[what[0]] = what[1]
        elif kind == "makes":
            ahead.made.add(what[0])
        elif kind == "replaces":
            ahead.replaces(*what)
        elif kind == "moves":
            ahead.moves(*what)
        elif kind == "ran alone":
            self.alone[what[0]] = what[1], when
        elif kind == "crossed":
            self.barriers.append(when)
        else:
            self.ended = True


def moved_path(path: str, folder: str, to: str) -> str:
    """Where ``path`` is after ``folder`` was moved to the path ``to``.

    >>> moved_path("/a/b/c", "/a/b", "/d"), moved_path("/a/bc", "/a/b", "/d")
    ('/d/c', '/a/bc')
    """
    return to + path[len(folder) :] if path == folder or is_inside(path, folder) else path


class Progress:
    """How many changes to files each rank of the node has made, in shared memory. All ranks make the same changes.

    Args:
        folder: the folder that the ranks of the node share.
        local_rank: this rank on its node.
        local_size: the number of ranks on the node.

    Attributes:
        done: the number of changes that this rank has made.
    """

    ENDED = 2**62

    def __init__(self, folder: Path, local_rank: int, local_size: int) -> None:
        self._page = shared_memory(folder / "progress", 8 * local_size)
        self._rank, self._form = local_rank, struct.Struct(f"{local_size}q")
        self.done = 0

    def count(self) -> None:
        """Record that this rank has made another change."""
        self.done += 1
        struct.pack_into("q", self._page, 8 * self._rank, self.done)

    def slowest(self) -> int:
        """The number of changes that the slowest of the other ranks has made."""
        done = list(self._form.unpack(self._page[:]))
        done[self._rank] = self.ENDED
        return min(done)

    def is_behind(self) -> bool:
        """Whether the first rank of the node has made fewer changes than this one."""
        return self._form.unpack(self._page[:])[0] < self.done

    def close(self) -> None:
        """Record that this rank needs no more files of the others."""
        struct.pack_into("q", self._page, 8 * self._rank, self.ENDED)
        self._page.close()
