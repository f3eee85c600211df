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
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeAlias

from parwrap.errors import RankMismatchError
from parwrap.places import script_place
from parwrap.rank_zero.journal import NOT_KEPT, ROUNDING, Ahead, JournalReader, earliest_time
from parwrap.rank_zero.listing import PART, is_link
from parwrap.rank_zero.path_rules import MOST_LINKS, PathRules, ancestors, is_inside

__all__ = ["FILE", "FOLDER", "GONE", "LINK", "MARK", "CheckWait", "Entry", "Overlay", "missing"]

FILE, FOLDER, LINK, GONE = "file", "folder", "link", "gone"

MARK = b"parwrap: rank 0 saves this checkpoint at "
"""What a marker begins with; the name of the save follows."""

LONGEST_MARK = 4096

NAP = 0.002
"""Seconds between two looks at the journal."""

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
        scratch: an empty directory of this rank.
        with_rank_zero: whether rank 0 is on this node, so that the journal names all folders that it makes.
        timeout: how many seconds to wait for rank 0.
        check_wait: called now and then during a wait, with the time when it began and what it is for; raises if rank 0 waits for this rank.
    """

    def __init__(
        self, rules: PathRules, journal: JournalReader, scratch: str, with_rank_zero: bool, timeout: float, check_wait: CheckWait
    ) -> None:
        self.rules, self.scratch, self._journal = rules, scratch, journal
        self._with_rank_zero, self._timeout, self._check_wait = with_rank_zero, timeout, check_wait
        self._entries: dict[str, Entry] = {}
        self._inside: defaultdict[str, set[str]] = defaultdict(set)
        self._names = {"", ".", ".."}
        self._covering = 0
        self._folders: dict[str, str] = {}
        self._made = 0
        self.since = rules.since
        """Paths that have changed after this time are hidden, because rank 0 may be ahead."""
        self._running: dict[Any, float] = {}
        self._ran: list[tuple[float, float]] = []
        self._left_alone: list[str] = []
        self._alone: list[tuple[float, float]] = []
        """When rank 0 ran each call that this rank has skipped, as far as this rank has waited for them. Rank 0 may have run more since."""
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
            raise missing(path)
        return found

    def may_differ(self, path: Any) -> bool:
        """Whether this rank may have changed ``path``. This is quick, because every call asks."""
        return self._covering > 0 or os.path.basename(path if type(path) is str else os.fsdecode(path)) in self._names

    def may_be_made_ahead(self, key: str) -> bool:
        """Whether rank 0, on another node, may have made the folder ahead of this rank. On its own node, the journal names them."""
        if self._with_rank_zero or key in self._entries or not os.path.isdir(key):
            return False
        return os.stat(key).st_ctime > self.since

    def entry(self, key: str) -> Entry | None:
        return self._entries.get(key)

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
        entry.left_alone = len(self._left_alone)
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
        """Record that a file, a link or an empty folder is gone."""
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
        self.remove(source)

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
        self.since = self._time_of_barrier(self._journal.crossed()) + ROUNDING
        self._ran.clear()
        for key, entry in list(self._entries.items()):
            if entry.kind == GONE:
                self._forget(key)
            elif entry.covers and os.path.isdir(key):
                self._covering -= 1
                entry.opaque, entry.origin = False, None

    def leave_alone(self, call: str) -> None:
        """Record that rank 0 runs a ``call`` that this rank skips. On other nodes than rank 0's, show all that is on the disk now."""
        if self._with_rank_zero:
            self._left_alone.append(call)
        else:
            self.since = time.time() + ROUNDING

    def close(self) -> None:
        """Remove all scratch files."""
        self._journal.close()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def child_began(self, process: Any) -> None:
        """Record that a child process of this rank begins: what changes on the disk while it runs is shown to this rank."""
        self._running[process] = earliest_time()

    def child_ended(self, process: Any) -> None:
        """Record that a child process has ended, unless its end is known already."""
        if (begin := self._running.pop(process, None)) is not None:
            self._ran.append((begin, time.time()))

    def working_directory(self, real: str) -> str:
        """The path that the script knows for the working directory ``real``, which may be in scratch."""
        if self._folders and self.owns(real):
            for place in (real, *ancestors(real)):
                if place in self._folders:
                    return self._folders[place] + real[len(place) :]
        return real

    def _time_of_barrier(self, number: int) -> float:
        """When rank 0 passed barrier ``number``: what it has changed since is hidden."""
        since = time.monotonic()
        while self._with_rank_zero and len(self._journal.update().barriers) < number and not self._journal.ended:
            if time.monotonic() > since + self._timeout:
                break
            time.sleep(NAP / 10)  # it passes too, at the same moment
        return self._journal.barriers[number - 1] if len(self._journal.barriers) >= number else time.time()

    def on_disk(self, key: str) -> str | None:
        """The path on the disk that this rank may see at ``key``; ``None`` if a change of this rank hides it."""
        for path in (key, *ancestors(key)) if self._covering else ():
            entry = self._entry_in_force(path)
            if entry is not None and (entry.covers or entry.kind != FOLDER):
                return entry.origin + key[len(path) :] if entry.origin else None
        return key

    def hidden(self, path: str, found: os.stat_result) -> bool:
        """Whether to hide ``path``, whose status on the disk is ``found``: rank 0 or another process has changed it ahead of this rank."""
        if self.rules.of_another_rank(path):
            return True
        when = found.st_ctime
        if self.rules.exempt(path):
            return False
        if when <= self.since or not self.rules.in_process():
            return False
        for process in [each for each in list(self._running) if getattr(each, "exitcode", None) is not None]:  # of a pool, which joins none
            self.child_ended(process)
        if any(_is_during(when, span) for span in [*self._ran, *((begin, math.inf) for begin in list(self._running.values()))]):
            return False
        self._wait_for_what_runs_alone()
        if self._is_made_alone(when):
            return False
        if stat.S_ISDIR(found.st_mode):
            return path in self._ahead().made
        return True

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
                if attempt or len(self._left_alone) == len(self._alone):
                    break
                self._wait_for_what_runs_alone()  # which may make it
        return False

    def _visible_names(self, folder: str) -> Iterator[str]:
        recent = os.stat(folder).st_ctime > self.since  # the time of a folder changes with its entries
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith(PART):
                    continue
                try:
                    if not (recent and self.hidden(os.path.join(folder, entry.name), entry.stat(follow_symlinks=False))):
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
        while len(self._alone) < len(self._left_alone):
            call = self._left_alone[len(self._alone)]
            while call not in self._journal.update().alone and not self._journal.ended and time.monotonic() < since + self._timeout:
                self._check_wait(since, what)
                time.sleep(NAP)
            before = self._alone[-1] if self._alone else (-math.inf, -math.inf)
            self._alone.append(self._journal.alone.get(call, before))

    def _entry_in_force(self, key: str) -> Entry | None:
        """The entry of ``key``. It is forgotten if rank 0 has since changed the path in something that it runs alone."""
        entry = self._entries.get(key)
        if entry is None or entry.kind == FOLDER or entry.left_alone == len(self._left_alone) or not self.rules.in_process():
            return entry
        self._wait_for_what_runs_alone()
        try:
            when = os.lstat(key).st_ctime
        except OSError:
            return entry
        if not self._is_made_alone(when, entry.left_alone):
            return entry
        self._forget(key)
        return None

    def _is_made_alone(self, when: float, first: int = 0) -> bool:
        """Whether ``when`` is inside a call that rank 0 ran alone and this rank skipped; only those from number ``first`` on count."""
        latest = bisect_right(self._alone, when + ROUNDING, lo=first, key=itemgetter(0)) - 1
        return latest >= first and _is_during(when, self._alone[latest])

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


def _is_during(when: float, span: tuple[float, float]) -> bool:
    return span[0] - ROUNDING <= when <= span[1] + ROUNDING


def missing(path: Any) -> FileNotFoundError:
    """The error that the system raises for a missing path."""
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
