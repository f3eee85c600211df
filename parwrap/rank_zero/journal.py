"""What the first rank of a node tells the others about files: a journal in the folder that the ranks of the node share.

The first rank writes a line only if another rank could otherwise see something different: where a checkpoint was saved, which folders are
made, what is about to be replaced or removed, and when the first rank ran something alone. The other ranks read the new lines when they
look at a recent path.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from parwrap.places import is_ours, is_standard
from parwrap.ranks.platform import OPEN_OWN, read_at, shared_memory

__all__ = ["Journal", "JournalReader", "Progress", "Sites", "clock"]


def clock() -> float:
    """The time by the clock that file systems use, which is a few milliseconds behind."""
    if sys.platform == "win32":
        return time.time()
    return time.clock_gettime(getattr(time, "CLOCK_REALTIME_COARSE", time.CLOCK_REALTIME))


class Sites:
    """Numbers the saves at each line outside of parwrap and torch. Ranks agree on them even if one rank saves more at another line."""

    def __init__(self) -> None:
        self._saves: Counter[str] = Counter()
        self._lock = threading.Lock()

    def next(self) -> str:
        """The name of the save that the running code begins."""
        frame = sys._getframe(1)
        while frame.f_back is not None and (is_ours(frame.f_code.co_filename) or is_standard(frame.f_code.co_filename)):
            frame = frame.f_back
        site = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        with self._lock:
            self._saves[site] += 1
            return f"{site} #{self._saves[site]}"


class Journal:
    """Appends to the journal.

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
        """Record that ``path``, from before the run, is about to change. It can still be read at ``before``, empty for a folder."""
        self._add("replaces", path, before)

    def ran_alone(self, since: float) -> None:
        """Record that something which only this rank runs began at the time ``since`` and ended now."""
        self._add("ran alone", since)

    def close(self) -> None:
        """Record that this rank writes no more, and close the journal."""
        self._add("ended")
        os.close(self._file)

    def _add(self, *line: Any) -> None:
        os.write(self._file, json.dumps([clock(), *line]).encode() + b"\n")


class JournalReader:
    """Reads the journal.

    Attributes:
        saves: where to read each save.
        made: the folders that the first rank has begun to make since the last barrier.
        before: for each path that existed before the run and has changed since the last barrier, where to read its old content; empty for a
            folder.
        alone: the beginning and end of what the first rank ran alone.
        ended: whether the first rank writes no more.
    """

    def __init__(self, folder: Path) -> None:
        self.saves: dict[str, str] = {}
        self.made: set[str] = set()
        self.before: dict[str, str] = {}
        self.alone: list[tuple[float, float]] = []
        self.ended = False
        self._file = os.open(folder / "journal", os.O_RDONLY | os.O_CREAT | OPEN_OWN, 0o600)
        self._read = 0
        self._lock = threading.Lock()

    def update(self) -> JournalReader:
        """Read the lines that are new."""
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
        """Forget what the first rank did before the barrier that all ranks have passed, because it is no longer ahead."""
        self.update()
        self.made.clear()
        self.before.clear()

    def close(self) -> None:
        os.close(self._file)

    def _take(self, when: float, kind: str, *what: Any) -> None:
        if kind == "saved":
            self.saves[what[0]] = what[1]
        elif kind == "makes":
            self.made.add(what[0])
        elif kind == "replaces":
            self.before.setdefault(what[0], what[1])
        elif kind == "ran alone":
            self.alone.append((what[0], when))
        else:
            self.ended = True


class Progress:
    """How many changes to files each rank of the node has made, in shared memory. All ranks make the same changes.

    Args:
        folder: the folder that the ranks of the node share.
        local_rank: this rank on its node.
        local_size: the number of ranks on the node.
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
