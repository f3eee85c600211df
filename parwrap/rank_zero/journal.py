"""What the first rank of a node tells the others about files: a journal in the folder that the ranks of the node share.

It is the one record of what this job has changed on the disk. The first rank writes a line before its first change of a path, and again at
the first one after a barrier, so the journal grows with the paths and not with the calls. The other ranks read the new lines when they look
at a path. What is not in the journal was made by another program or by a child process, and every rank sees it.
"""

from __future__ import annotations

import json
import os
import struct
import threading
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parwrap.places import running_line
from parwrap.rank_zero.path_rules import ancestors, is_inside
from parwrap.ranks.platform import OPEN_OWN, read_at, shared_memory

__all__ = ["NOT_KEPT", "Ahead", "Journal", "JournalReader", "Progress", "Sites", "moved_path"]

NOT_KEPT = "not-kept"
"""The name of a folder that does not exist. The journal names a path in it for a file whose old content is lost."""


class Sites:
    """Numbers the calls at each line of the script or of a library. Ranks agree on the numbers, even if one calls more at another line."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._lock = threading.Lock()

    def next(self) -> str:
        """Count a call at the running line of the script or of a library, and return its name: ``file:line #number``."""
        site = running_line()
        with self._lock:
            self._calls[site] += 1
            return f"{site} #{self._calls[site]}"


TURNS = ("removed", "changes alone")
"""The kinds of lines after which something else is at a path."""


class Journal:
    """Writes the journal of a node. Only the first rank of the node has one.

    Args:
        folder: the folder that the ranks of the node share.
    """

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / "journal", os.O_WRONLY | os.O_APPEND | os.O_CREAT | OPEN_OWN, 0o600)
        self._add("process", os.getpid())

    def saved(self, save: str, place: str) -> None:
        """Record that ``save``, a name from :class:`Sites`, can be read at ``place``."""
        self._add("saved", save, place)

    def makes(self, path: str) -> None:
        """Record that ``path`` is about to be made, or that this job has made it and is about to change it again."""
        self._add("makes", path)

    def replaces(self, path: str, before: str) -> None:
        """Record that ``path`` is about to change. Other ranks read its old content at ``before``, which is empty for a folder."""
        self._add("replaces", path, before)

    def removed(self, path: str) -> None:
        """Record that ``path``, a folder or a file from before this job, is gone."""
        self._add("removed", path)

    def moves(self, folder: str, to: str) -> None:
        """Record that ``folder`` is about to be moved to the path ``to``."""
        self._add("moves", folder, to)

    def changes_alone(self, path: str, call: int) -> None:
        """Record that ``path`` is about to change in something that only this rank runs, its call number ``call`` of that kind."""
        self._add("changes alone", path, call)

    def crossed(self) -> None:
        """Record that this rank has passed a barrier: the other ranks see what is there now."""
        self._add("crossed")

    def close(self) -> None:
        """Record that this rank writes no more, and close the journal."""
        self._add("ended")
        os.close(self._file)

    def _add(self, *line: Any) -> None:
        os.write(self._file, json.dumps(line).encode() + b"\n")


@dataclass
class Ahead:
    """What the first rank has changed since a barrier.

    Attributes:
        made: the paths that it has begun to make.
        changed: the paths that it has begun to make or change.
        before: for each path that existed and has changed, where to read its old content; empty for a folder. A path is named as it was
            before folders moved.
        moved: for each folder that existed and was moved, where it is now.
    """

    made: set[str] = field(default_factory=set)
    changed: set[str] = field(default_factory=set)
    before: dict[str, str] = field(default_factory=dict)
    moved: dict[str, str] = field(default_factory=dict)

    def makes(self, path: str) -> None:
        """Note that the first rank is about to make ``path``."""
        self.made.add(path)
        self.changed.add(path)

    def replaces(self, path: str, before: str) -> None:
        """Note that the first rank is about to change ``path``."""
        self.changed.add(path)
        self.before.setdefault(self.before_moves(path), before)

    def moves(self, folder: str, to: str) -> None:
        """Note that the first rank is about to move ``folder`` to the path ``to``."""
        if folder not in self.made or folder in self.moved.values():  # it existed
            self.moved.setdefault(self.before_moves(folder), folder)
        self.moved = {path: moved_path(place, folder, to) for path, place in self.moved.items()}
        self.made |= {moved_path(path, folder, to) for path in self.made}
        self.changed |= {moved_path(path, folder, to) for path in self.changed}

    def place(self, path: str) -> str | None:
        """Where ``path`` is now if it, or a folder above it, was moved; otherwise ``None``."""
        folder = next((each for each in (path, *ancestors(path)) if each in self.moved), None) if self.moved else None
        return None if folder is None else moved_path(path, folder, self.moved[folder])

    def before_moves(self, path: str) -> str:
        """What ``path`` was called before the first rank moved it, or a folder above it."""
        for before, place in self.moved.items():
            if path == place or is_inside(path, place):
                return moved_path(path, place, before)
        return path


class JournalReader:
    """Reads the journal in ``folder``.

    Attributes:
        saves: where to read each saved file, by the name of its save.
        ahead: what the first rank has changed since the last barrier of this rank, as far as this rank has read.
        alone: the paths that the first rank has changed in something that it runs alone, each with the number of that call.
        turned: the paths where something else begins: removed since, or changed in something that runs alone.
        process: the first rank's process; ``None`` if it has not written yet.
        ended: whether the first rank writes no more.
    """

    def __init__(self, folder: Path) -> None:
        self.saves: dict[str, str] = {}
        self.ahead = Ahead()
        self.alone: dict[str, int] = {}
        self.turned: set[str] = set()
        self.process: int | None = None
        self.ended = False
        self._lines: list[tuple[int, str, list[Any]]] = []  # those that say what the first rank has changed, each with its barrier
        self._barriers = self._own_barriers = 0
        self._file = os.open(folder / "journal", os.O_RDONLY | os.O_CREAT | OPEN_OWN, 0o600)
        self._read = 0
        self._lock = threading.RLock()

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

    def crossed(self) -> None:
        """Forget what the first rank changed before the barrier that this rank has passed."""
        with self._lock:
            self._own_barriers += 1
            self._read_again(self._lines)

    def turn(self, path: str, removals: int = 0, calls: int = 0) -> int:
        """Forget what the first rank did at ``path``, and below, before something else began there: this rank has come as far.

        Args:
            path: the path.
            removals: how often this rank has removed the path; the first rank may have removed it more often since.
            calls: how many calls, which the first rank runs alone, this rank has skipped.

        Returns:
            How many of the removals the first rank has made too.
        """
        with self._lock:
            lines = [(number, kind, what[1:]) for number, (_, kind, what) in enumerate(self._lines) if kind in TURNS and what[0] == path]
            removed = [number for number, kind, _ in lines if kind == "removed"][:removals]
            passed = removed + [number for number, kind, what in lines if kind == "changes alone" and what[0] <= calls]
            if passed:
                last = max(passed)
                before = [line for line in self._lines[:last] if line[2][0] != path and not is_inside(line[2][0], path)]
                self._read_again(before + self._lines[last + 1 :])
            return len(removed)

    def _read_again(self, lines: list[tuple[int, str, list[Any]]]) -> None:
        self._lines, self.ahead, self.turned = [], Ahead(), set()
        for barriers, kind, what in lines:
            self._change(barriers, kind, what)

    def close(self) -> None:
        os.close(self._file)

    def _take(self, kind: str, *what: Any) -> None:
        if kind == "saved":
            self.saves[what[0]] = what[1]
        elif kind == "crossed":
            self._barriers += 1
        elif kind == "process":
            self.process = what[0]
        elif kind == "ended":
            self.ended = True
        else:
            self._change(self._barriers, kind, list(what))

    def _change(self, barriers: int, kind: str, what: list[Any]) -> None:
        if kind == "changes alone":
            self.alone[what[0]] = what[1]
        if barriers < self._own_barriers:
            return
        self._lines.append((barriers, kind, what))
        if kind in TURNS:
            self.turned.add(what[0])
        else:
            getattr(self.ahead, kind)(*what)


def moved_path(path: str, folder: str, to: str) -> str:
    """Where ``path`` is after ``folder`` was moved to the path ``to``.

    >>> moved_path("/a/b/c", "/a/b", "/d"), moved_path("/a/bc", "/a/b", "/d")
    ('/d/c', '/a/bc')
    """
    return to + path[len(folder) :] if path == folder or is_inside(path, folder) else path


class Progress:
    """How many changes to files each rank of the node has made, and what rank 0 has run alone, in shared memory.

    All ranks make the same changes. Calls that rank 0 runs alone are counted by their line of the script.

    Args:
        folder: the folder that the ranks of the node share.
        local_rank: this rank on its node.
        local_size: the number of ranks on the node.

    Attributes:
        done: the number of changes that this rank has made.
    """

    ENDED = 2**62
    LINES = 256
    """The number of counters for calls that rank 0 runs alone. Lines with the same checksum share one."""

    def __init__(self, folder: Path, local_rank: int, local_size: int) -> None:
        self._page = shared_memory(folder / "progress", 8 * (local_size + self.LINES))
        self._alone = 8 * local_size
        self._rank, self._form = local_rank, struct.Struct(f"{local_size}q")
        self.done = 0

    def count(self) -> None:
        """Record that this rank has made another change."""
        self.done += 1
        struct.pack_into("q", self._page, 8 * self._rank, self.done)

    def slowest(self) -> int:
        """The number of changes that the slowest of the other ranks has made."""
        done = list(self._form.unpack_from(self._page))
        done[self._rank] = self.ENDED
        return min(done)

    def is_behind(self) -> bool:
        """Whether the first rank of the node has made fewer changes than this one."""
        return self._form.unpack_from(self._page)[0] < self.done

    @staticmethod
    def counter(line: str) -> int:
        """The counter of ``line``, from :func:`running_line`."""
        return zlib.crc32(line.encode()) % Progress.LINES

    def ran_alone(self, counter: int) -> None:
        """Record that rank 0 has run another call alone."""
        struct.pack_into("q", self._page, self._alone + 8 * counter, self.times_alone(counter) + 1)

    def times_alone(self, counter: int) -> int:
        """How often rank 0 has run a call with this ``counter`` alone."""
        return int(struct.unpack_from("q", self._page, self._alone + 8 * counter)[0])

    def close(self) -> None:
        """Record that this rank needs no more files of the others."""
        struct.pack_into("q", self._page, 8 * self._rank, self.ENDED)
        self._page.close()
