"""Which files a rank above 0 sees: its own in a scratch directory, and those on the disk without the changes of a rank 0 that is ahead.

``Overlay.find`` is the rule: it returns where this rank reads a path. ``replica.py`` sends the intercepted calls here.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
import stat
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from parwrap.errors import RankMismatchError
from parwrap.places import script_place
from parwrap.rank_zero.journal import NOT_KEPT, Ahead, JournalReader, Progress, moved_path
from parwrap.rank_zero.listing import PART, is_link
from parwrap.rank_zero.path_rules import MOST_LINKS, PathRules, ancestors, is_inside
from parwrap.ranks.platform import open_for_writing

__all__ = ["FILE", "FOLDER", "GONE", "LINK", "MARK", "CheckWait", "Entry", "Overlay", "missing"]

FILE, FOLDER, LINK, GONE = "file", "folder", "link", "gone"

MARK = b"parwrap: rank 0 saves this checkpoint at "
"""What a marker begins with; the name of the save follows."""

LONGEST_MARK = 4096

NAP = 0.002
"""Seconds between two looks at the journal."""

HIDDEN = (
    ", and this rank does not see it before the next barrier. Call parwrap.barrier() before the line that reads it, or let rank 0 write it "
    "in a function with @parwrap.rank_zero_only"
)
"""What an error says about a path that is hidden from this rank, after who has written it."""

CheckWait: TypeAlias = Callable[[float, str], None]


@dataclass
class Entry:
    """A path that this rank has changed.

    Attributes:
        kind: what it is now: ``FILE``, ``FOLDER``, ``LINK`` or ``GONE``.
        place: where the content is; ``None`` if the path is gone. For a folder: a folder in scratch, read if the disk has none to show.
        opaque: whether this folder hides a folder at the same path on the disk, for example because this folder was moved there.
        origin: the path on the disk from which the folder was moved, with all that is in it.
        left_alone: how many calls this rank had skipped before the change, because rank 0 runs them alone.
    """

    kind: str
    place: str | None = None
    opaque: bool = False
    origin: str | None = None
    left_alone: int = 0

    @property
    def covers(self) -> bool:
        """Whether the entry hides what the disk has below this path."""
        return self.kind == GONE or self.opaque or self.origin is not None


class Overlay:
    """The files of one rank. Paths are named by ``PathRules.key``. A small file in scratch, a *marker*, stands for each save of rank 0.

    Args:
        rules: which paths are exempt.
        journal: the journal of the first rank of this node.
        progress: how often rank 0 has run something alone.
        scratch: an empty directory of this rank.
        with_rank_zero: whether rank 0 is on this node, so that the journal names all that it changes. On other nodes, a file that changes
            during the run is hidden, because rank 0 may have changed it.
        timeout: how many seconds to wait for rank 0.
        check_wait: called now and then during a wait, with the time when it began and what it is for; raises if rank 0 waits for this rank.
    """

    def __init__(
        self,
        rules: PathRules,
        journal: JournalReader,
        progress: Progress,
        scratch: str,
        with_rank_zero: bool,
        timeout: float,
        check_wait: CheckWait,
    ) -> None:
        rules.known_path = self.known_path
        self.rules, self.scratch, self._journal, self._progress = rules, scratch, journal, progress
        self._with_rank_zero, self._timeout, self._check_wait = with_rank_zero, timeout, check_wait
        self._entries: dict[str, Entry] = {}
        self._inside: defaultdict[str, set[str]] = defaultdict(set)
        self._names = {"", ".", ".."}
        self._covering = 0
        self._folders: dict[str, str] = {}
        self._made = 0
        self._since = rules.since  # on another node than rank 0's
        self._skipped: Counter[int] = Counter()
        """How many calls this rank has skipped because rank 0 runs them alone, by their line."""
        self._waits_for: set[int] = set()
        self._removals: Counter[str] = Counter()
        """How often this rank has removed a path, which rank 0 has not removed as often yet."""
        self._empty: dict[str, str] = {}

    def find(self, key: str) -> str | None:
        """Where the content of the path is for this rank; ``None`` if the path does not exist."""
        entry = self._entry_in_force(key)
        if entry is not None and entry.kind != FOLDER:
            return self._present(entry.place, key) if entry.place else None
        disk = self.on_disk(key)
        found = self._visible(disk) if disk else None
        if found is None and disk and disk != key:
            found = self._visible(key)  # rank 0, on another node, has moved its folder too
        return found or (entry.place if entry else None)

    def existing(self, key: str, path: Any) -> str:
        """As :meth:`find`, but raise ``FileNotFoundError`` with ``path``, the script's name for it, if it does not exist."""
        found = self.find(key)
        if found is None:
            who = "Rank 0 has written it" if self._with_rank_zero else "It has changed during the run"
            raise missing(path, who + HIDDEN if self._hides(key) else None)
        return found

    def _hides(self, key: str) -> bool:
        """Whether the path is on the disk, and this rank does not see it because rank 0 has changed it ahead of this rank."""
        return key not in self._entries and self.on_disk(key) == key and os.path.lexists(key) and not self.rules.of_another_rank(key)

    def may_differ(self, path: Any) -> bool:
        """Whether this rank may have changed ``path``. This is quick, because every call asks."""
        return self._covering > 0 or os.path.basename(path if type(path) is str else os.fsdecode(path)) in self._names

    def may_be_made_ahead(self, key: str) -> bool:
        """Whether rank 0, on another node, may have made the folder ahead of this rank. On its own node, the journal names them."""
        if self._with_rank_zero or key in self._entries or not os.path.isdir(key):
            return False
        return os.stat(key).st_ctime > self._since

    def shows(self, found: os.stat_result) -> bool:
        """Whether this rank sees whatever is on the disk with the status ``found``. This is quick, because every call asks."""
        if self._with_rank_zero:
            ahead = self._ahead()
            return not (ahead.changed or ahead.moved or self._journal.alone)
        return found.st_ctime <= self._since

    def entry(self, key: str) -> Entry | None:
        return self._entries.get(key)

    def files(self) -> list[str]:
        """The files that this rank has written, in the order of the first writing."""
        return [key for key, entry in self._entries.items() if entry.kind == FILE]

    def resolved(self, key: str) -> str:
        """The path that ``key`` leads to through links."""
        for _ in range(MOST_LINKS):
            key = self.rules.followed(key)
            place = self.find(key)
            if place is None or not is_link(place):
                break
            key = self.rules.key(os.path.join(os.path.dirname(key), os.readlink(place)))
        return key

    def at(self, key: str) -> str:
        """As :meth:`resolved`, without following a link at the path itself."""
        folder, name = os.path.split(key)
        return os.path.join(self.rules.followed(folder), name)

    def names(self, key: str) -> list[str]:
        """The names that this rank sees in the folder."""
        found = set()
        if disk := self.on_disk(key):
            shown = self._visible(disk) or disk
            for place in {shown, key} if disk != key else {shown}:
                if os.path.isdir(place):
                    found |= set(self._visible_names(place))
            found |= {os.path.basename(path) for path in self._ahead().before if os.path.dirname(path) == disk}
        for name in list(self._inside.get(key, ())):
            if (entry := self._entry_in_force(os.path.join(key, name))) is not None:
                (found.discard if entry.kind == GONE else found.add)(name)
        return sorted(found)

    def record(self, key: str, entry: Entry, target: str | None = None) -> None:
        """Record that the path is now what ``entry`` says; ``target`` is the target of a link."""
        if key in self._entries:
            self._forget(key, keeps=entry.place)
        entry.left_alone = self._skipped.total()
        self._entries[key] = entry
        folder, name = os.path.split(key)
        self._inside[folder].add(name)
        self._names.update((name, os.path.basename(folder)))
        self._covering += entry.covers or entry.kind == LINK
        if entry.kind == FOLDER and entry.place:
            self._folders[entry.place] = key
        self.rules.link(key, target)

    def make_folder(self, key: str) -> None:
        """Record a new, empty folder."""
        self.record(key, Entry(FOLDER, self.fresh(key, folder=True), opaque=self.on_disk(key) is None))

    def remove(self, key: str) -> None:
        """Record that a file, a link or an empty folder is gone, because the script has removed it."""
        self._removals[key] += 1
        self._hide(key)

    def _hide(self, key: str) -> None:
        self.record(key, Entry(GONE))

    def remove_tree(self, key: str) -> None:
        """Record that a folder and all below it are gone."""
        for below in self._below(key):
            self._forget(below)
        self.remove(key)

    def move(self, source: str, key: str) -> None:
        """Record that ``source`` and everything below it is now at ``key``."""
        place, entry, target = self.find(source), self._entries.get(source), self.rules.target(source)
        if place is None or is_link(place) or not os.path.isdir(place):
            moved = entry or Entry(FILE, place)
            self._drop_record(source)
            self.record(key, moved, target)
        else:
            origin = self.on_disk(source)
            below = {path[len(source) :]: (self._entries[path], self.rules.target(path)) for path in self._below(source)}
            for path in [*self._below(source), *self._below(key)]:
                self._drop_record(path)
            self._drop_record(source)
            empty = entry.place if entry else self.fresh(key, folder=True)
            self.record(key, Entry(FOLDER, empty, opaque=True, origin=origin))
            for path, (inner, inner_target) in below.items():
                self.record(key + path, inner, inner_target)
        self._hide(source)

    def fresh(self, key: str, folder: bool = False) -> str:
        """A new path in the scratch directory, where an empty folder is made if ``folder``.

        It ends with the same name as ``key``, because some libraries look at the name.
        """
        self._made += 1
        inside = os.path.join(self.scratch, str(self._made))
        os.mkdir(inside)
        path = os.path.join(inside, os.path.basename(key))
        if folder:
            os.mkdir(path)
        return path

    def owns(self, place: Any) -> bool:
        """Whether ``place`` is a scratch file of this rank, which it may change."""
        return isinstance(place, str) and is_inside(place, self.scratch)

    def marked(self, place: Any) -> str | None:
        """The name of the save that the marker at ``place`` stands for, or ``None`` if there is no marker."""
        if not self.owns(place) or not os.path.isfile(place) or os.path.getsize(place) > LONGEST_MARK:
            return None
        with open(place, "rb") as file:
            first = file.readline()
        return first[len(MARK) :].decode().rstrip("\n") if first.startswith(MARK) else None

    def check_kept(self, place: Any) -> None:
        """Raise if the content that this rank should read at ``place`` is lost."""
        folder, name = os.path.split(place)
        if os.path.basename(folder) == NOT_KEPT:
            raise RankMismatchError(
                f"{script_place()} reads {name}, which rank 0 has already replaced or removed, like many other files. Slower ranks can "
                "read only a limited number of such files: call parwrap.barrier() before the line that replaces or removes them."
            )

    def content(self, place: Any) -> Any:
        """Where to read the content of ``place``. For a marker, wait until this node's first rank has saved it, and return where."""
        self.check_kept(place)
        save = self.marked(place)
        if save is None:
            return place
        since, what = time.monotonic(), f"a file of rank 0 at {script_place()}"
        while True:
            ended = self._journal.update().ended
            found = self._journal.saves.get(save)
            if found is not None and os.path.exists(found):
                return found
            if found is not None and self._journal.update().saves[save] != found:
                continue  # rank 0 has ended since, and named the path instead of its descriptor
            if found is not None or ended or time.monotonic() > since + self._timeout:
                raise RankMismatchError(self._not_found(os.path.basename(place), save, replaced=found is not None))
            self._check_wait(since, what)
            time.sleep(NAP)

    def _not_found(self, name: str, save: str, replaced: bool) -> str:
        line, _, number = save.rpartition(" #")
        problem = "rank 0 has replaced or removed that file" if replaced else "rank 0 has not saved at that line as often"
        return (
            f"{script_place()} loads {name}, which this rank saved at {os.path.basename(line)} (save {number} at that line). Only rank 0 "
            f"writes checkpoints, and {problem}: the ranks run different calls. Save and remove files alike on all ranks, or save in "
            "`with parwrap.every_rank_writes():` what only some ranks need."
        )

    def crossed(self) -> None:
        """Show this rank the disk as it was when all ranks passed a barrier."""
        self._journal.crossed()
        self._removals.clear()
        self._since = time.time()
        for key, entry in list(self._entries.items()):
            if entry.kind == GONE:
                self._forget(key)
            elif entry.covers and os.path.isdir(key):
                self._covering -= 1
                entry.opaque, entry.origin = False, None

    def leave_alone(self, line: str) -> None:
        """Record that rank 0 runs a call at ``line`` that this rank skips. On other nodes, show all that is on the disk now."""
        self._since = time.time()
        if self._with_rank_zero:
            counter = self._progress.counter(line)
            self._skipped[counter] += 1
            self._waits_for.add(counter)

    def close(self) -> None:
        """Remove all scratch files."""
        self._journal.close()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def closes_late(self) -> bool:
        """Whether rank 0 has a file open for writing that this rank has written and closed."""
        process = self._journal.update().process
        if not self._with_rank_zero or process is None:
            return False
        written = [each for path in open_for_writing(process) if (each := self._entries.get(path)) is not None and each.kind == FILE]
        return bool(written) and not {each.place for each in written} <= open_for_writing(os.getpid())

    def child_began(self) -> None:
        """Record that a child process of this rank begins. On other nodes, show all that is on the disk until the next barrier."""
        self._since = math.inf

    def known_path(self, real: str) -> str:
        """The path that the script knows for an open folder, which may be in scratch, or moved by this rank or a rank 0 that is ahead."""
        if self.owns(real):
            if folder := next((each for each in (real, *ancestors(real)) if each in self._folders), None):
                return moved_path(real, folder, self._folders[folder])
            real = next((disk for disk, place in self._empty.items() if place == real), real)
        else:
            real = self._ahead().before_moves(real)
        moved = ((key, entry.origin) for key, entry in list(self._entries.items()) if entry.origin) if self._covering else ()
        return next((moved_path(real, origin, key) for key, origin in moved if real == origin or is_inside(real, origin)), real)

    def on_disk(self, key: str) -> str | None:
        """The path on the disk that this rank may see at ``key``; ``None`` if a change of this rank hides it."""
        for path in (key, *ancestors(key)) if self._covering else ():
            entry = self._entry_in_force(path)
            if entry is not None and (entry.covers or entry.kind != FOLDER):
                return entry.origin + key[len(path) :] if entry.origin else None
        return key

    def hidden(self, path: str, found: os.stat_result) -> bool:
        """Whether to hide ``path``, whose status on the disk is ``found``: rank 0 has changed it ahead of this rank."""
        if self.rules.of_another_rank(path):
            return True
        if self.rules.exempt(path) or not self.rules.in_process():
            return False
        is_folder = stat.S_ISDIR(found.st_mode)
        if not self._with_rank_zero:
            return not is_folder and found.st_ctime > self._since
        if path in self._journal.update().alone:
            self._wait_for_what_runs_alone()
            if self._journal.alone[path] > self._skipped.total():
                return True
            self._journal.turn(path, calls=self._skipped.total())
        ahead = self._journal.ahead
        return path in (ahead.made if is_folder else ahead.changed)

    def _visible(self, disk: str) -> str | None:
        """The path to read for ``disk``, a path on the disk.

        That is ``disk`` itself unless it is hidden. If rank 0 has changed it since the last barrier, that is where its old content is;
        for a folder that is gone, an empty folder. ``None`` if this rank sees nothing there.
        """
        if self._is_visible(disk):
            return disk
        ahead = self._ahead()
        moved = ahead.place(disk)
        if moved and (os.path.isdir(moved) if disk in ahead.moved else self._is_visible(moved)):
            return moved
        if disk not in ahead.before:
            return None
        return ahead.before[disk] or self._empty.get(disk) or self._empty.setdefault(disk, self.fresh(disk, folder=True))

    def _is_visible(self, disk: str) -> bool:
        for attempt in range(2):
            try:
                return not self.hidden(disk, os.lstat(disk))
            except (FileNotFoundError, NotADirectoryError):
                if attempt or not self._waits_for:
                    break
                self._wait_for_what_runs_alone()  # which may make it
        return False

    def _visible_names(self, folder: str) -> Iterator[str]:
        shows = self.shows(os.stat(folder))
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith(PART):
                    continue
                try:
                    path = os.path.join(folder, entry.name)
                    if not (self.rules.of_another_rank(path) if shows else self.hidden(path, entry.stat(follow_symlinks=False))):
                        yield entry.name
                except FileNotFoundError:
                    pass  # rank 0 has removed it since

    def _present(self, place: str, key: str) -> str:
        """``place`` if it still exists. If rank 0 has moved or removed it, the place of its old content, or else ``key``."""
        if self.owns(place) or os.path.lexists(place):
            return place
        return self._ahead().before.get(place) or key

    def _ahead(self) -> Ahead:
        """What rank 0 has changed since the last barrier. A forked process sees the disk."""
        return self._journal.update().ahead if self.rules.in_process() else Ahead()

    def _wait_for_what_runs_alone(self) -> None:
        """Wait until rank 0 has run each call that this rank has skipped: all ranks see the files that rank 0 makes there."""
        since, what = time.monotonic(), f"what rank 0 runs alone, at {script_place()}"
        for counter in list(self._waits_for):
            while self._progress.times_alone(counter) < self._skipped[counter]:
                if self._journal.update().ended or time.monotonic() > since + self._timeout:
                    break
                self._check_wait(since, what)
                time.sleep(NAP)
            self._waits_for.discard(counter)
        self._journal.update()

    def _entry_in_force(self, key: str) -> Entry | None:
        """The entry of ``key``. It is forgotten if what it hides on the disk is gone, or if rank 0 has since changed the path alone."""
        entry = self._entries.get(key)
        if entry is None or not self.rules.in_process():
            return entry
        covers = entry.covers and entry.origin is None and self._removals[key] > 0
        if covers and key in self._journal.update().turned and (entry.kind == FOLDER or os.path.lexists(key)):
            self._removals[key] -= self._journal.turn(key, self._removals[key], self._skipped.total())
            if self._removals[key] == 0 and entry.kind == GONE:
                self._forget(key)
                return None
            if self._removals[key] == 0:
                self._covering -= 1
                entry.opaque = False
        if entry.kind == FOLDER or entry.left_alone == self._skipped.total():
            return entry
        self._wait_for_what_runs_alone()
        if not entry.left_alone < self._journal.alone.get(key, 0) <= self._skipped.total():
            return entry
        self._forget(key)
        return None

    def _below(self, folder: str) -> list[str]:
        return [key for key in list(self._entries) if is_inside(key, folder)]

    def _forget(self, key: str, keeps: str | None = None) -> None:
        """Forget the entry of ``key`` and remove its scratch file, unless that is at ``keeps``."""
        entry = self._drop_record(key)
        if entry.place is not None and self.owns(entry.place) and entry.place != keeps:
            shutil.rmtree(os.path.dirname(entry.place), ignore_errors=True)

    def _drop_record(self, key: str) -> Entry:
        entry = self._entries.pop(key, None) or Entry(GONE)
        folder, name = os.path.split(key)
        if name in self._inside.get(folder, ()):
            self._inside[folder].discard(name)
            self._covering -= entry.covers or entry.kind == LINK
        self._folders.pop(entry.place or "", None)
        self.rules.link(key, None)
        return entry


def missing(path: Any, why: str | None = None) -> FileNotFoundError:
    """The error that the system raises for a missing path; ``why`` says more."""
    return FileNotFoundError(errno.ENOENT, ". ".join(filter(None, (os.strerror(errno.ENOENT), why))), path)
