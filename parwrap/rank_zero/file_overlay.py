"""The files that a replica sees: rank 0's at the same point of the script, or the replica's own changes in scratch files.

The user's files are never changed here; scratch files are in a temporary directory. ``replica_files.py`` maps the intercepted calls to
these methods.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from parwrap.errors import RankMismatchError
from parwrap.rank_zero.file_versions import Awaited, Outcome, Saving
from parwrap.rank_zero.path_rules import PathRules, ancestors
from parwrap.rank_zero.per_thread import passing
from parwrap.system.scratch import scratch_directory

__all__ = ["Entry", "FileOverlay", "missing"]

PATIENCE = 10
"""Seconds that a child process, which has no store, waits for rank 0 to create a folder."""


@dataclass
class Entry:
    """A path that this rank has changed.

    Attributes:
        version: the number of its versions, as this rank counts them.
        clock: the sync point count when this rank closed the latest version.
        own: the number of versions that this rank closed since the sync point before that.
        kind: ``"file"``, ``"folder"``, ``"link"`` or ``"gone"``.
        scratch: the path of this rank's own copy; a checkpoint has none.
        writers: the number of open files that write to it.
        whole: whether the entry covers everything below it too, like a moved or removed folder.
        expected: whether it is a checkpoint that rank 0 also saves when it reaches this point of the script.
    """

    version: int
    clock: int = -1
    own: int = 0
    kind: str = "file"
    scratch: str | None = None
    writers: int = 0
    whole: bool = False
    expected: bool = False

    @property
    def changeable(self) -> bool:
        """Whether the scratch file is this rank's own, rather than something that it has moved."""
        return self.scratch is not None and not os.path.islink(self.scratch)


class FileOverlay:
    """The files of one replica; every method takes paths by their keys.

    Args:
        awaited: rank 0's announcements.
        rules: the path rules; the scratch directory is added to them as this rank's own.
    """

    def __init__(self, awaited: Awaited, rules: PathRules) -> None:
        self._awaited, self._rules = awaited, rules
        self._entries: dict[str, Entry] = {}
        self._inside: defaultdict[str, set[str]] = defaultdict(set)
        self._scratch: str | None = None
        self._scratches = 0
        self._elsewhere: dict[str, bool] = {}
        self._saves: Counter[str] = Counter()
        self.lock = threading.RLock()
        self.names = {"", ".", ".."}
        """The last parts of all paths that this rank has changed. Other paths need no lookup."""
        self.whole: set[str] = set()
        """The entries that cover everything below them."""
        self.since = rules.since

    def get(self, key: str) -> Entry | None:
        return self._entries.get(key)

    def concerns(self, name: str) -> bool:
        """Whether this rank may have changed a path whose last part is ``name``."""
        return name in self.names or bool(self.whole)

    def changed(self, key: str, kind: str, scratch: str | None = None, target: str | None = None, whole: bool = False) -> None:
        """Record another version of the path, already closed."""
        with self.lock:
            entry = self.entry(key)
            self._count(entry)
            if entry.scratch and entry.scratch != scratch:
                _drop(entry.scratch)
            entry.kind, entry.scratch, entry.whole, entry.expected = kind, scratch, whole, False
            (self.whole.add if whole else self.whole.discard)(key)
            self._rules.link(key, target)

    def saved(self, key: str, place: str) -> bool:
        """Record that a checkpoint is saved to the path, at ``place`` in the script. Returns whether rank 0 is known to save it too."""
        self.changed(key, "file")
        with self.lock:
            self._saves[place] += 1
            entry, number = self._entries[key], self._saves[place]
        saving = self._awaited.saving(key, entry.version, self._own(entry), place, number)
        entry.expected = saving is not Saving.OTHERWISE
        return saving is Saving.SAME

    def lost_elsewhere(self, key: str) -> bool:
        """Whether this rank, on another node, would not find a file that rank 0 saves there. Each folder is checked once."""
        folder, entry = os.path.dirname(key), self._entries[key]
        if self._awaited.apart and folder not in self._elsewhere:
            outcome, record, _ = self._awaited.wait(key, entry.version, self._own(entry))
            if outcome is not Outcome.THERE:
                return False
            self._elsewhere[folder] = not record.is_at(key)
        return self._elsewhere.get(folder, False)

    def keep(self, key: str, scratch: str) -> None:
        """Keep ``scratch`` as this rank's copy of its last save to the path."""
        self._entries[key].scratch = scratch

    def entry(self, key: str) -> Entry:
        """The entry of a path that this rank is about to change."""
        with self.lock:
            entry = self._entries.get(key)
            if entry is None:
                entry = self._entries[key] = Entry(self._awaited.before(key))
                folder, name = os.path.split(key)
                self._inside[folder].add(name)
                self.names.update((name, os.path.basename(folder)))
            return entry

    def below(self, folder: str) -> list[str]:
        """The paths below ``folder`` that this rank has changed."""
        return [key for key in self._entries if key.startswith(f"{folder}/")]

    def inside(self, folder: str) -> set[str]:
        """The names in ``folder`` that this rank has changed."""
        return self._inside.get(folder, set())

    def followed(self, key: str) -> str:
        """The path that ``key`` leads to through links that this rank has created."""
        return self._rules.followed(key)

    def exists(self, key: str) -> bool:
        """Whether the path exists for this rank. This does not wait for a path that the rank has changed."""
        entry = self._entries.get(key)
        return entry.kind != "gone" if entry else self._real(key) is not None

    def readable(self, key: str, waits: bool = True) -> str:
        """Where to read the path's content for this rank.

        Args:
            key: the path.
            waits: whether to wait for rank 0 if this rank has changed the path.

        Raises:
            FileNotFoundError: the path does not exist for this rank.
        """
        entry = self._entries.get(key)
        if entry is None:
            found = self._real(key, waits)
            if found is None:
                raise missing(key)
            return found
        if entry.kind == "gone":
            raise missing(key)
        if entry.writers and entry.scratch:
            return entry.scratch
        return self._awaited_file(key, entry) if waits else entry.scratch or key

    def replaced(self, key: str, path: str) -> bool:
        """Whether rank 0 has begun to replace the result of :meth:`readable` while it was opened at ``path``."""
        entry = self._entries.get(key)
        if entry is None:
            return self._real(key) != path
        return path == key and self._awaited.replaced(key, entry.version, self._own(entry))

    def _awaited_file(self, key: str, entry: Entry) -> str:
        outcome, record, version = self._awaited.wait(key, entry.version, self._own(entry), needs_it=entry.expected)
        with self.lock:
            entry.version = version  # rank 0's own numbers may make it decide differently: continue from its count
        if outcome is not Outcome.REPLACED:
            with self.lock:
                if entry.kind == "folder" and entry.whole:
                    entry.whole = False
                    self.whole.discard(key)
            if os.path.lexists(key) and (outcome is Outcome.NEVER or record.is_at(key)):
                return key
        elif os.path.exists(kept := record.kept.get(str(version), "")):
            return kept
        if entry.scratch and os.path.lexists(entry.scratch):
            return entry.scratch
        if outcome is Outcome.THERE and self._awaited.replaced(key, version, self._own(entry)):
            return self._awaited_file(key, entry)  # rank 0 has removed it since it was looked up
        if outcome is not Outcome.REPLACED:
            raise missing(key)
        raise RankMismatchError(
            f"this rank is at version {entry.version} of {key}, but rank 0 is ahead and has already replaced or removed that version. "
            "Read the file in `with parwrap.rank_zero_first():`, or call parwrap.barrier() before you replace it."
        )

    def _real(self, key: str, waits: bool = True) -> str | None:
        """The path itself, if it is on the disk and not only because rank 0 is ahead."""
        for folder in ancestors(key) if self.whole else ():
            entry = self._entries.get(folder)
            if not entry or not entry.whole:
                continue
            if entry.kind == "gone":
                return None
            if waits:
                self._awaited_file(folder, entry)
            break
        try:
            changed = os.lstat(key).st_ctime
        except OSError:
            changed = self.since  # rank 0 may have removed it
        return self._awaited.present(key) if waits and changed >= self.since else key

    def hidden(self, key: str, changed: float) -> bool:
        """Whether the path, last changed at time ``changed``, exists only because rank 0 is ahead, or belongs to another rank."""
        return changed >= self.since and (self._rules.of_another_rank(key) or self._awaited.present(key) is None)

    def settle(self) -> None:
        """Let removed folders no longer cover everything below, once rank 0 has removed them too."""
        for key in list(self.whole):
            entry = self._entries[key]
            record = self._awaited.record(key) if entry.kind == "gone" else None
            if record and record.closed >= entry.version:
                entry.whole = False
                self.whole.discard(key)

    def begin(self, key: str, keep: bool) -> str:
        """Begin to write a file. Returns the path to write to, which has the file's present content if ``keep``."""
        entry = self._entries.get(key)
        present = entry.scratch if keep and entry and entry.kind == "file" and entry.changeable else None
        if keep and present is None and self.exists(key):
            suffix = os.path.splitext(key)[1]
            present = self.read_current(key, lambda place: self.fresh(place, suffix=suffix), _drop)
        with self.lock:
            present = present or self.fresh(suffix=os.path.splitext(key)[1])
            entry = self.entry(key)
            if entry.scratch and entry.scratch != present:
                _drop(entry.scratch)
            entry.kind, entry.scratch, entry.whole, entry.expected = "file", present, False, False
            entry.writers += 1
            return present

    def read_current(self, key: str, read: Callable[[str], Any], discard: Callable[[Any], Any], waits: bool = True) -> Any:
        """Apply ``read`` to the path's present location, and repeat it if rank 0 replaces the file during the read.

        Args:
            key: the path.
            read: a function of a path on disk.
            discard: a function, called with the result of a read that was too late.
            waits: whether this process can wait for rank 0; if not, it reads once.
        """
        while True:
            place = self.readable(key, waits=waits)
            try:
                result = read(place)
            except Exception:  # a half-written file raises many kinds of errors
                if not (waits and self.replaced(key, place)):
                    raise
            else:
                if not (waits and self.replaced(key, place)):
                    return result
                discard(result)

    def finish(self, key: str, failed: bool = False) -> None:
        """Record that a written file was closed, or ``failed`` to open."""
        with self.lock:
            entry = self._entries[key]
            entry.writers -= 1
            if not failed:
                self._count(entry)

    def make(self, folder: str, waits: bool) -> None:
        """Create this rank's folder on disk too, once rank 0 has created it or will not."""
        entry = self._entries.get(folder)
        if entry is None or entry.kind != "folder" or os.path.isdir(folder):
            return
        if waits:
            self._awaited.wait(folder, entry.version, self._own(entry))
        else:  # a child process cannot ask rank 0
            deadline = time.monotonic() + PATIENCE
            while not os.path.isdir(folder) and time.monotonic() < deadline:
                time.sleep(0.01)
        os.makedirs(folder, exist_ok=True)

    def _count(self, entry: Entry) -> None:
        """Record that another version is closed."""
        now = self._awaited.clock
        entry.own = entry.own + 1 if entry.clock == now else 1
        entry.version += 1
        entry.clock = now

    def _own(self, entry: Entry) -> int:
        return entry.own if entry.clock == self._awaited.clock else 0

    def moved(self, source: str, key: str) -> None:
        """Record that ``source`` and everything below it is now at ``key``."""
        with self.lock:
            pairs = [(source, key), *((below, key + below[len(source) :]) for below in self.below(source) if self.exists(below))]
            folder = self._is_folder(source)
            for old, new in pairs:
                entry = self._entries.get(old)
                if entry:
                    kind, scratch, expected, entry.scratch = entry.kind, entry.scratch, entry.expected, None
                else:  # it stays at its old location until rank 0 moves it
                    kind, scratch, expected = "folder" if folder else "file", self.fresh(), False
                    os.symlink(old, scratch)
                self.changed(new, kind, scratch, self._rules.target(old), whole=folder and old == source)
                self._entries[new].expected = expected
                self.changed(old, "gone", whole=folder and old == source)

    def copied(self, key: str) -> str | None:
        """A copy of this rank's own file, if it has one."""
        entry = self._entries.get(key)
        return self.fresh(copy_of=entry.scratch) if entry and entry.scratch else None

    def removed_ahead(self, key: str) -> bool:
        """Whether the path does not exist only because rank 0 is ahead."""
        return self._awaited.removed_ahead(key)

    def _is_folder(self, key: str) -> bool:
        entry = self._entries.get(key)
        return entry.kind == "folder" if entry else os.path.isdir(key)

    def fresh(self, copy_of: str | None = None, folder: bool = False, suffix: str = "") -> str:
        """A new path in the scratch directory; some libraries choose the format by the ``suffix``."""
        with self.lock, passing():
            if self._scratch is None:
                self._scratch = scratch_directory()
                self._rules.own(self._scratch)
            self._scratches += 1
            path = os.path.join(self._scratch, f"{self._scratches}{suffix}")
            if folder:
                os.mkdir(path)
            elif copy_of is not None:
                shutil.copyfile(copy_of, path)
            return path

    def close(self) -> None:
        """Remove all scratch files."""
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)


def missing(path: Any) -> FileNotFoundError:
    """The error that the system raises for a missing path."""
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def _drop(scratch: str) -> None:
    try:
        os.unlink(scratch)
    except IsADirectoryError:
        os.rmdir(scratch)
    except OSError:
        pass
