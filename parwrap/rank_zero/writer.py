"""Rank 0's files: every call runs unchanged. Only what slower ranks may still need is kept readable for them.

A checkpoint or a file from before the run stays readable through a descriptor after rank 0 has replaced or removed it, until every rank
of the node has made more changes than rank 0 had made then. This costs no copy and no time, only disk space. Systems without ``/proc``
use a second name of the file instead, in the job's folder.
"""

from __future__ import annotations

import io
import os
import shutil
import stat
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, TypeAlias

from parwrap.places import Place, running_line
from parwrap.rank_zero.calls import Change, Opening, writes
from parwrap.rank_zero.commands import warn_of_command
from parwrap.rank_zero.journal import NOT_KEPT, Journal, Progress, Sites, moved_path
from parwrap.rank_zero.last_read import LastRead
from parwrap.rank_zero.listing import PART, Entries
from parwrap.rank_zero.path_rules import PathRules, is_inside, passing
from parwrap.rank_zero.whole_files import write_whole
from parwrap.ranks.group import is_alone, is_on_one_rank
from parwrap.ranks.platform import path_of

__all__ = ["CheckSave", "KeptReadable", "WriterFiles", "close_left_open", "saved_path"]

CheckSave: TypeAlias = Callable[[Callable[[], bool]], None]
"""Raises if rank 0 may not save now; the argument says whether a checkpoint is saved."""

MOST_KEPT = 64
"""The number of files to keep readable by descriptors. Checkpoints above that number are read by their path."""

MOST_COPIED = 2**26
"""The maximum size, in bytes, of a file that is copied before rank 0 changes it in place. Slower ranks may see a larger one changed."""


def saved_path(file: Any) -> Any:
    """The path that ``torch.save`` writes to: ``file`` itself, or that of an open file; ``None`` for others, such as each rank's buffer."""
    if isinstance(file, (str, os.PathLike)):
        return file
    if type(file) in (io.BufferedWriter, io.BufferedRandom, io.FileIO) and isinstance(file.name, (str, os.PathLike)):
        return file.name
    return None


OF_DATABASES = ("-journal", "-wal", "-shm")
"""The ends of the names of files that native code keeps beside a database that is open."""


class KeptReadable:
    """Files that other ranks of the node can read through this process's descriptors, or by their second names.

    Args:
        journal: tells the other ranks where to read them.
        progress: the changes that all ranks have made.
        folder: a folder for second names.
    """

    def __init__(self, journal: Journal, progress: Progress, folder: str) -> None:
        self._journal, self._progress, self._folder = journal, progress, folder
        self._lock = threading.Lock()  # scripts save in threads
        self._kept: dict[int, str | None] = {}
        self._lost_at: dict[int | str, int] = {}  # how many changes rank 0 had made when the file was removed
        self._names: dict[str, None] = {}
        self._named = 0
        self._checkpoints: set[tuple[int, int, int]] = set()

    def is_checkpoint(self, path: Any) -> bool:
        """Whether the file at ``path`` is a checkpoint of this run."""
        with suppress(OSError):
            return _identity(path) in self._checkpoints
        return False

    def save(self, save: str, path: str) -> None:
        """Keep the checkpoint at ``path`` readable, and tell the other ranks where; ``save`` is its name from :class:`Sites`."""
        with self._lock:
            self._release()
            self._journal.saved(save, self._keep(save, path) or path)
            self._checkpoints.add(_identity(path))

    def before(self, path: str) -> str:
        """Keep the file at ``path`` readable before it is replaced or removed. Returns where: in ``NOT_KEPT`` if too many are kept."""
        with self._lock:
            self._release()
            return self._keep(None, path) or os.path.join(self._folder, NOT_KEPT, os.path.basename(path))

    def close(self) -> None:
        """Tell the other ranks the paths of checkpoints that still exist. No descriptor is closed yet: a rank may be about to open it."""
        for descriptor in self._kept:
            self._name_path(descriptor)
        _left_open.extend(self._kept)
        self._journal.close()

    def _keep(self, save: str | None, path: str) -> str | None:
        """Keep the file at ``path``, a checkpoint if ``save`` names it. Returns where it is readable; ``None`` if too many are kept."""
        if not os.path.isdir("/proc/self/fd"):
            return self._second_name(path)
        if len(self._kept) >= MOST_KEPT:
            checkpoints = (each for each, saved in self._kept.items() if saved is not None)
            if (descriptor := next((each for each in checkpoints if _present_path(each)), None)) is None:
                return None
            self._drop(descriptor)
        descriptor = os.open(path, os.O_RDONLY)
        self._kept[descriptor] = save
        if save is None:
            self._lost_at[descriptor] = self._progress.done
        return f"/proc/{os.getpid()}/fd/{descriptor}"

    def _second_name(self, path: str) -> str:
        """A hard link to ``path``, or ``path`` itself if it is on another drive than the job's folder."""
        self._named += 1
        name = os.path.join(self._folder, f"kept-{self._named}")
        try:
            os.link(path, name)
        except OSError:
            return path
        self._names[name] = None
        return name

    def _release(self) -> None:
        """Let go of removed files that no rank needs any more.

        That is so once every other rank has made more changes than rank 0 had made when it removed the file.
        """
        slowest = self._progress.slowest()
        for descriptor, save in list(self._kept.items()):
            if (save is None or os.fstat(descriptor).st_nlink == 0) and slowest > self._lost_at.setdefault(descriptor, self._progress.done):
                self._drop(descriptor)
        for name in list(self._names):
            if os.stat(name).st_nlink == 1 and slowest > self._lost_at.setdefault(name, self._progress.done):
                del self._names[name], self._lost_at[name]
                os.unlink(name)

    def _drop(self, descriptor: int) -> None:
        self._name_path(descriptor)
        del self._kept[descriptor]
        self._lost_at.pop(descriptor, None)
        os.close(descriptor)

    def _name_path(self, descriptor: int) -> None:
        save = self._kept[descriptor]
        if save is not None and (path := _present_path(descriptor)):
            self._journal.saved(save, path)


def _present_path(descriptor: int) -> str | None:
    """The path of the open file now; ``None`` if it was removed."""
    path = os.readlink(f"/proc/self/fd/{descriptor}")
    return path if os.path.exists(path) else None


def _identity(path: Any) -> tuple[int, int, int]:
    found = os.stat(path)
    return found.st_dev, found.st_ino, found.st_mtime_ns


_left_open: list[int] = []
"""Descriptors that earlier scopes left open; the next scope closes them."""


def close_left_open() -> None:
    """Close the descriptors of earlier scopes. When a new scope opens, all ranks have left the earlier ones."""
    while _left_open:
        os.close(_left_open.pop())


class WriterFiles:
    """The file calls of rank 0.

    Args:
        rules: which paths are exempt.
        journal: what the other ranks of the node read.
        progress: the changes that all ranks have made.
        folder: a folder for copies.
        size: the number of ranks.

    Attributes:
        check_save: called before an object is saved, and once it is written.
    """

    def __init__(self, rules: PathRules, journal: Journal, progress: Progress, folder: str, size: int) -> None:
        self._rules, self._journal, self._progress, self._folder, self._size = rules, journal, progress, folder, size
        self._kept, self._sites, self._copies = KeptReadable(journal, progress, folder), Sites(), 0
        self.last_read = LastRead()
        self.check_save: CheckSave = lambda is_checkpoint: None
        self._said: set[Place] = set()
        self._changed: set[str] = set()
        self._hidden: set[str] = set()  # what is in the journal since the last barrier
        self._old: set[str] = set()  # of this, what had existed before
        self._alone: set[str] = set()  # what has changed last in something that this rank runs alone
        self._calls_alone, self._is_alone = 0, False
        self._streams: weakref.WeakSet[Any] = weakref.WeakSet()

    def close(self) -> None:
        """Let all calls run unchanged from now on, and flush files that the script has left open: the process may end without flushing."""
        self._rules.open = False
        with passing():
            for stream in list(self._streams):
                with suppress(OSError, ValueError):  # it is closed
                    stream.flush()
            self._kept.close()
            self._progress.close()

    def crossed(self) -> None:
        """Tell the other ranks that rank 0 has passed a barrier: what it changes from now on is ahead of them."""
        self._journal.crossed()
        self._hidden.clear()
        self._old.clear()

    @contextmanager
    def running_alone(self) -> Iterator[None]:
        """Tell the other ranks that rank 0 runs the block alone: they see the files that it makes there, in other threads too."""
        counter = self._progress.counter(running_line())
        self._calls_alone += 1
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False
            self._progress.ran_alone(counter)

    def left_alone(self) -> None:
        """Does nothing: rank 0 itself runs what the other ranks skip."""

    def written(self) -> list[str]:
        """The names of the files that only this rank sees: none."""
        return []

    def open(self, call: Opening) -> Any:
        if not call.writes or call.opener is not None:
            return call.run()
        with self._changing(call.file):
            stream = call.run()
        self._streams.add(stream)
        return stream

    def open_descriptor(self, original: Callable, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        with self._changing(path, dir_fd) if writes(flags) else nullcontext():
            return original(path, flags, mode, dir_fd=dir_fd)

    def look(self, name: str, original: Callable, path: Any, args: tuple, kwargs: dict) -> Any:
        return original(path, *args, **kwargs)

    def attribute(self, name: str, original: Callable, path: Any, args: tuple, kwargs: dict) -> Any:
        self._changes(path, kwargs.get("dir_fd"), in_place=True)
        return original(path, *args, **kwargs)

    def listing(self, name: str, original: Callable, path: Any, args: tuple, kwargs: dict) -> Any:
        """``os.listdir`` and ``os.scandir``: sorted as on all ranks, without the temporary files of other ranks."""
        path = "." if path is None else path
        if not self._rules.looks():
            return original(path)
        with passing():
            folder = path_of(path) if isinstance(path, int) else path
            if name == "scandir":
                with original(path) as entries:
                    found = sorted(entries, key=lambda entry: entry.name)
                return Entries(entry for entry in found if self._lists(os.path.join(folder, entry.name)))
            return sorted(each for each in original(path) if self._lists(os.path.join(folder, each)))

    def _lists(self, path: Any) -> bool:
        return not (os.path.basename(os.fsdecode(path)).startswith(PART) or self._rules.of_another_rank(path))

    def change(self, change: Change) -> Any:
        """Run a call that makes, removes or moves paths, and tell the other ranks what they could not know."""
        gone = self._changes(*change.gone) if change.gone else None
        made = self._changes(*change.made, in_place=change.name in ("truncate", "copyfile")) if change.made else None
        if gone is None and made is None:
            return change.run()
        if change.name == "link":
            self._changes(*change.source, in_place=True)  # type: ignore[misc]
        with passing():
            folder_gone = gone if gone and os.path.isdir(gone) and not os.path.islink(gone) else None
            if made and folder_gone:
                self._journal.moves(folder_gone, made)
                self._changed |= {moved_path(each, folder_gone, made) for each in list(self._changed)}
                self._hidden |= {moved_path(each, folder_gone, made) for each in list(self._hidden)}
            elif folder_gone:
                self._keep_old_below(folder_gone)
            try:
                result = change.run()
                if made and change.name == "copyfile":
                    self._copied(change, made)
                if folder_gone:
                    self._changed = {each for each in list(self._changed) if not is_inside(each, folder_gone)}
                self._changed.discard(gone or "")
                if gone and not made and (folder_gone or gone in self._old):
                    self._removed(gone)
                elif gone in self._old:
                    self._hidden.discard(gone)
                return result
            except Exception:
                if made and folder_gone:
                    self._journal.moves(made, folder_gone)
                raise
            finally:
                self._progress.count()

    def _removed(self, gone: str) -> None:
        """Tell the other ranks that ``gone`` is gone with all below: what is there later is not what they remove."""
        self._journal.removed(gone)
        here = {each for each in list(self._hidden) if each == gone or is_inside(each, gone)}
        self._hidden -= here
        self._old -= here

    def _copied(self, change: Change, made: str) -> None:
        """If ``change`` has copied a checkpoint, keep the copy ``made`` readable as another checkpoint."""
        save = self._sites.next()
        if self._kept.is_checkpoint(change.source[0]):  # type: ignore[index]
            self._kept.save(save, made)

    def working_directory(self, original: Callable[[], str]) -> str:
        return original()

    def temporary_name(self, name: str) -> str:
        return self._rules.temporary_name(name)

    def run_command(self, run: Callable[[], Any], command: Any) -> Any:
        if command is not None and self._rules.acts():
            warn_of_command(command, self._size, self._said)
        return run()

    def save(self, file: Any, write: Callable[[Any], Any], is_checkpoint: Callable[[], bool]) -> Any:
        """``torch.save``: a file given by its path is written by :func:`write_whole`.

        The other ranks can load a checkpoint, except from a buffer or a path that every rank writes.
        """
        path = saved_path(file)

        def checked(place: Any) -> Any:
            result = write(place)
            self.check_save(is_checkpoint)  # while values came from the GPU they may have been spoiled
            return result

        self.check_save(is_checkpoint)
        if path is None or not self._rules.looks():
            return checked(file)
        key = self._changes(path)
        with passing():
            if path is file:
                result = write_whole(file, checked)
            else:
                result = checked(file)
                file.flush()
            if key is not None:
                if is_checkpoint():
                    self._kept.save(self._sites.next(), key)
                self._progress.count()
            return result

    def read_native(self, path: Any, read: Callable[[Any], Any]) -> Any:
        return read(path)

    def write_native(self, path: Any, mode: str, write: Callable[[Any], Any]) -> Any:
        with self._changing(path) as key, passing():
            if key is not None and set(mode) >= set("a+"):
                for end in OF_DATABASES:
                    self._keep_old(key + end, in_place=True)
            return write(path)

    @contextmanager
    def _changing(self, path: Any, dir_fd: int | None = None) -> Iterator[str | None]:
        """Around a call that opens ``path`` to change it. It counts once the file is open: a child of another rank waits for its end."""
        key = self._changes(path, dir_fd, in_place=True)
        try:
            yield key
        finally:
            if key is not None:
                self._progress.count()

    def _changes(self, path: Any, dir_fd: int | None = None, in_place: bool = False) -> str | None:
        """Prepare for a change of ``path``: at its first change, keep what is there, for slower ranks. The caller counts the change.

        Args:
            path: the path, as the script gives it.
            dir_fd: the directory that a relative path starts from, as in ``os.open``.
            in_place: the file is changed and not replaced, so up to a size of ``MOST_COPIED`` a copy of it is kept.

        Returns:
            The key of the path, or ``None`` if the rules of rank 0's files do not apply to it.
        """
        key = self._rules.writes(path, dir_fd)
        changed = key or (self._rules.writes(path, dir_fd, alone=True) if is_alone() else None)
        if changed is not None and self._is_alone:
            self._changes_alone(changed)
        elif changed is not None and (key is not None or not is_on_one_rank()):  # the other ranks change it too, or run the block next
            with passing():
                self._keep_old(changed, in_place)
        return key

    def _changes_alone(self, key: str) -> None:
        """Record a change of the path named ``key`` in something that the other ranks do not run."""
        if key not in self._alone:
            self._alone.add(key)
            self._journal.changes_alone(key, self._calls_alone)

    def _keep_old_below(self, folder: str) -> None:
        """Keep what is in ``folder``, which is about to be removed."""
        for above, folders, files in os.walk(folder):
            for name in (*folders, *files):
                self._keep_old(os.path.join(above, name))

    def _keep_old(self, key: str, in_place: bool = False) -> None:
        """Hide ``key`` from slower ranks. Keep what is there, unless this job has made it: those ranks then have their own version."""
        self._alone.discard(key)
        if key in self._changed and key in self._hidden:
            return
        try:
            found = os.lstat(key)
        except OSError:
            if key not in self._hidden:
                self._journal.makes(key)
        else:
            if key not in self._changed:
                self._old.add(key)
                with suppress(OSError):
                    self._keep(key, found, in_place)
            elif not stat.S_ISDIR(found.st_mode):
                self._journal.makes(key)
        self._changed.add(key)
        self._hidden.add(key)

    def _keep(self, key: str, found: os.stat_result, in_place: bool) -> None:
        if stat.S_ISDIR(found.st_mode):
            self._journal.replaces(key, "")
        elif stat.S_ISREG(found.st_mode) and not (in_place and found.st_size <= MOST_COPIED):
            self._journal.replaces(key, self._kept.before(key))
        elif stat.S_ISREG(found.st_mode):
            self._copies += 1
            copy = os.path.join(self._folder, f"before-{self._copies}")
            shutil.copyfile(key, copy)
            self._journal.replaces(key, copy)
