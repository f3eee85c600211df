"""Intercepts file access on ranks other than 0: they write to their own overlay, and read what rank 0 has.

``file_overlay.py`` manages the overlay, and waits for rank 0.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from parwrap.coordination.call_site import location
from parwrap.intercept.disk import WRITING, Change, Opening
from parwrap.intercept.interceptor import intercepts
from parwrap.rank_zero.directory_listing import Entries, seen, seen_entries
from parwrap.rank_zero.file_overlay import FileOverlay, missing
from parwrap.rank_zero.file_versions import Awaited
from parwrap.rank_zero.open_files import is_too_large, is_valid, opened, writes
from parwrap.rank_zero.path_rules import PathRules
from parwrap.rank_zero.per_thread import passing
from parwrap.rank_zero.rank_files import RankFiles

__all__ = ["ReplicaFiles"]


class ReplicaFiles(RankFiles):
    """Keeps a replica's changes to files private to the replica.

    Args:
        rank: the global rank of this process.
        awaited: rank 0's announcements.
    """

    def __init__(self, rank: int, awaited: Awaited) -> None:
        rules = PathRules(rank)
        self._overlay = FileOverlay(awaited, rules)
        super().__init__(rules, self._overlay.finish)

    def close(self) -> None:
        """Let all calls run unchanged from now on, and discard the files that only this rank has seen."""
        self._rules.open = False
        self._overlay.close()

    @intercepts
    def save(self, file: Any, write: Callable[[Any], None]) -> None:
        """``torch.save``: writes nothing to a path, because checkpoints are large, unless this rank cannot read rank 0's file."""
        key = self._written(file) if isinstance(file, (str, os.PathLike)) else None
        if key is None:
            write(file)
            return
        if missing_folder := self._missing_folder(key):
            write(missing_folder)
            return
        with passing():
            key = self._overlay.followed(key)
            if not self._overlay.saved(key, location()) or self._overlay.lost_elsewhere(key):
                scratch = self._overlay.fresh()
                with suppress(OSError):  # the disk for temporary files may be small
                    write(scratch)
                    self._overlay.keep(key, scratch)

    @intercepts
    def read_native(self, path: Any, read: Callable[[Any], Any]) -> Any:
        """Run native code that reads a file, with the content that rank 0 has at the same point."""
        try:
            return self._read(path, lambda place: self._read_named(place, path, read))
        except FileNotFoundError:  # the native code reports the error
            return read(self._overlay.fresh() if os.path.lexists(path) else path)  # rank 0 is ahead and has made the file

    @intercepts
    def write_native(self, path: Any, write: Callable[[Any], Any]) -> Any:
        """Run native code that writes a whole file, to a scratch file."""

        def write_whole(place: Any, closed: Callable[[], None] | None) -> Any:
            result = write(place)
            if closed:
                closed()
            return result

        return self.open_native(path, "w", write_whole)

    @intercepts
    def update_native(self, path: Any, update: Callable[[Any], Any]) -> Any:
        """Run native code that may read and write a file until it exits: give it a copy that only this rank sees.

        A file that is too large to copy is opened in place.
        """
        if is_too_large(path):
            return update(path)
        return self.open_native(path, "a", lambda place, closed: update(place))

    @intercepts
    def open_native(self, path: Any, mode: str, open_at: Callable[[Any, Callable[[], None] | None], Any]) -> Any:
        """Run native code that opens a file; ``open_at`` takes the path and a function to call when the file is closed."""
        if not writes(mode):
            return self.read_native(path, lambda place: open_at(place, None))
        key = self._written(path)
        if key is None:
            return open_at(path, None)
        if missing_folder := self._missing_folder(key):
            return open_at(missing_folder, None)
        key, scratch = self._begin(key, path, keep="a" in mode or "r" in mode, new="x" in mode or "-" in mode, must_exist="r" in mode)
        try:
            with passing():
                return open_at(scratch, partial(self._finish, key))
        except BaseException:
            self._overlay.finish(key, failed=True)
            raise

    def _read_named(self, place: Any, path: Any, read: Callable[[Any], Any]) -> Any:
        """Call ``read`` with a path that has a name, which some libraries need; old versions that rank 0 keeps have no name."""
        if not str(place).startswith("/proc/"):
            return read(place)
        copy = self._overlay.fresh(place, suffix=os.path.splitext(os.fsdecode(path))[1])
        try:
            return read(copy)
        finally:
            os.unlink(copy)

    def _missing_folder(self, key: str) -> str | None:
        """A path where writing fails as it does for rank 0, if the folder of ``key`` does not exist; else ``None``."""
        folder, name = os.path.split(self._overlay.followed(key))
        with passing():
            return None if self._overlay.exists(folder) else os.path.join(self._overlay.fresh(), name)

    @intercepts
    def open(self, call: Opening) -> Any:
        """``open``: writes to a scratch file, or reads what rank 0 has at the same point."""
        file, mode = call.file, call.mode
        if not writes(mode):
            if isinstance(file, int) or call.opener is not None:
                return call.run()
            if not self._may_differ(file):
                with suppress(FileNotFoundError):
                    stream = call.run()
                    if os.fstat(stream.fileno()).st_ctime < self._overlay.since:
                        return stream
                    stream.close()
            return self._read(file, lambda path: call._replace(file=path).run())
        if call.opener is not None or not is_valid(call):
            return call.run()
        if isinstance(file, int):
            known = self._descriptors.pop(file, None) if call.closefd else None
            return opened(call, file, partial(self._finish, known)) if known else call.run()
        known = self._written(file)
        if known is None:
            return call.run()
        key, scratch = self._begin(known, file, keep="a" in mode or "r" in mode, new="x" in mode, must_exist="r" in mode)
        try:
            return opened(call._replace(mode=mode.replace("x", "w")), scratch, partial(self._finish, key))
        except BaseException:
            self._overlay.finish(key, failed=True)
            raise

    @intercepts
    def open_descriptor(self, original: Callable, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        """``os.open``: like ``open``."""
        if not flags & WRITING:
            return original(path, flags, mode, dir_fd=dir_fd) if dir_fd else self.look("open", original, path, (flags, mode), {})
        key = self._written(path, dir_fd)
        if key is None:
            return original(path, flags, mode, dir_fd=dir_fd)
        new = flags & os.O_CREAT and flags & os.O_EXCL
        key, scratch = self._begin(key, path, keep=not flags & os.O_TRUNC, new=bool(new), must_exist=not flags & os.O_CREAT)
        descriptor = original(scratch, (flags | os.O_CREAT) & ~os.O_EXCL, mode)
        self._descriptors[descriptor] = key
        return descriptor

    @intercepts
    def look(self, name: str, original: Callable, path: Any, args: tuple, kwargs: dict) -> Any:
        """``os.stat`` and similar calls, for the file that rank 0 has at the same point."""
        if isinstance(path, int) or kwargs.get("dir_fd") is not None or not self._may_differ(path):
            result = original(path, *args, **kwargs)
            if type(result) is not os.stat_result or result.st_ctime < self._overlay.since or isinstance(path, int) or "dir_fd" in kwargs:
                return result
        follow = name not in ("lstat", "readlink") and kwargs.get("follow_symlinks", True)
        try:
            return self._read(path, lambda place: original(place, *args, **kwargs), follow)
        except FileNotFoundError:
            if name == "access":
                return False
            raise

    @intercepts
    def listing(self, name: str, original: Callable, path: Any, args: tuple, kwargs: dict) -> Any:
        """``os.listdir`` and ``os.scandir``, for the folder as this rank sees it."""
        path = "." if path is None else path
        if isinstance(path, int) or not self._rules.acts() or self._rules.exempt(key := self._rules.key(path)):
            return original(path)
        with passing():
            key = self._overlay.followed(key)
            if not self._overlay.concerns(os.path.basename(key)) and os.stat(path).st_ctime < self._overlay.since:
                return original(path)
            found = seen(self._overlay, key)
        if name == "scandir":
            return Entries(seen_entries(path, found))
        return [os.fsencode(each) for each in found] if isinstance(os.fspath(path), bytes) else list(found)

    @intercepts
    def attribute(self, name: str, original: Callable, path: Any, args: tuple, kwargs: dict) -> Any:
        """``os.chmod``, ``os.utime`` and similar calls: only on scratch files."""
        key = self._written(path, kwargs.get("dir_fd"))
        if key is None:
            return original(path, *args, **kwargs)
        with passing():
            key = self._existing(key, path)
            entry = self._overlay.get(key)
            if entry and entry.changeable:
                return original(entry.scratch, *args, **{name: value for name, value in kwargs.items() if name != "dir_fd"})
            return None

    @intercepts
    def change(self, change: Change) -> Any:
        """Make, remove or move paths in the overlay."""
        gone, made = (self._written(*path) if path else None for path in (change.gone, change.made))
        if change.name in ("rename", "replace"):
            return self._move(change, gone, made)
        if gone is None and made is None:
            return change.run()
        if change.name == "rmtree" and not self._is_there(gone):  # type: ignore[arg-type]
            return change.run()  # finds nothing, and raises what the caller expects
        with passing():
            return getattr(self, f"_{change.name}")(change, gone or made)

    def _mkdir(self, change: Change, key: str) -> None:
        key = self._free(key, change.made)
        before = self._overlay.get(key)
        # the content of a removed folder is gone only when rank 0 has removed it
        self._overlay.changed(key, "folder", self._overlay.fresh(folder=True), whole=before is not None and before.whole)

    def _truncate(self, change: Change, key: str) -> None:
        key, scratch = self._begin(key, change.made, keep=True, must_exist=True)
        os.truncate(scratch, *change.options[0])
        self._overlay.finish(key)

    def _remove(self, change: Change, key: str) -> None:
        entry = self._overlay.get(key)
        if (entry is None or entry.kind == "gone") and not self._overlay.exists(key) and not self._overlay.removed_ahead(key):
            raise missing(change.gone[0])  # type: ignore[index]
        self._overlay.changed(key, "gone")

    _unlink = _remove

    def _rmdir(self, change: Change, key: str) -> None:
        if self._overlay.exists(key) and seen(self._overlay, key, waits=False):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), change.gone[0])  # type: ignore[index]
        self._remove(change, key)

    def _rmtree(self, change: Change, key: str) -> None:
        self._remove_all(key)

    def _remove_all(self, key: str) -> None:
        for below in self._overlay.below(key):
            if self._overlay.exists(below):
                self._overlay.changed(below, "gone")
        self._overlay.changed(key, "gone", whole=True)

    def _symlink(self, change: Change, key: str) -> None:
        key = self._free(key, change.made)
        scratch = self._overlay.fresh()
        os.symlink(change.target, scratch)
        self._overlay.changed(key, "link", scratch, os.fsdecode(change.target))

    def _link(self, change: Change, key: str) -> None:
        key = self._free(key, change.made)
        path, descriptor = change.source  # type: ignore[misc]
        source = self._overlay.followed(self._existing(self._rules.key(path, descriptor), path))
        self._overlay.changed(key, "file", self._overlay.copied(source))

    def _move(self, change: Change, gone: str | None, made: str | None) -> Any:
        """``os.rename`` and ``os.replace``, where either path may be exempt."""
        if gone is None and made is None:
            return change.run()
        with passing():
            if gone is None:
                scratch = self._overlay.fresh()
                shutil.move(change.gone[0], scratch)  # type: ignore[index]
                self._overlay.changed(made, "file", scratch)  # type: ignore[arg-type]
                return None
            gone = self._existing(gone, change.gone[0])  # type: ignore[index]
            if made is None:
                shutil.copyfile(self._overlay.readable(gone), change.made[0])  # type: ignore[index]
                self._overlay.changed(gone, "gone")
                return None
            self._overlay.moved(gone, made)
            return None

    def _written(self, path: Any, dir_fd: int | None = None) -> str | None:
        """The key of a path that is about to be changed, or ``None`` if the call runs unchanged: then its folder is made on the disk."""
        key = self._rules.writes(path, dir_fd)
        if key is None and self._overlay.names and self._rules.looks() and not isinstance(path, int):
            folder = os.path.dirname(self._rules.key(path, dir_fd))
            with passing():
                self._overlay.make(folder, waits=self._rules.in_process())
        return key

    def _may_differ(self, path: Any) -> bool:
        """Whether this rank may see something else at ``path`` than the disk has; quick, because every call asks."""
        return self._overlay.concerns((path if type(path) is str else os.fsdecode(path)).rpartition("/")[2])

    def _read(self, path: Any, read: Callable[[Any], Any], follow: bool = True) -> Any:
        """Call ``read`` with the current location of ``path``."""
        child = not self._rules.in_process()
        if not self._rules.looks() or not (child or self._rules.acts()):
            return read(path)
        with passing():
            key = self._rules.key(path)
            if self._rules.exempt(key):
                return read(path)
            overlay = self._overlay
            if not child:
                overlay.settle()
            try:
                named, key = key, overlay.followed(key) if follow else key
                return overlay.read_current(key, lambda place: read(path if place == named else place), _close, waits=not child)
            except FileNotFoundError:
                raise missing(path) from None

    def _existing(self, key: str, path: Any) -> str:
        if not self._is_there(key):
            raise missing(path)
        return key

    def _is_there(self, key: str) -> bool:
        """Whether this rank can change the file at ``key``, even if rank 0 has removed it already."""
        with passing():
            return self._overlay.exists(key) or self._overlay.removed_ahead(key)

    def _free(self, key: str, path: Any) -> str:
        """Check that something new can be made at ``key``, and return it."""
        if self._overlay.exists(key):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path[0])
        self._check_folder(key, path[0])
        return key

    def _check_folder(self, key: str, path: Any) -> None:
        if not self._overlay.exists(self._overlay.followed(os.path.dirname(key))):
            raise missing(path)

    def _begin(self, key: str, path: Any, keep: bool, new: bool = False, must_exist: bool = False) -> tuple[str, str]:
        """The key of a file that is about to be written, and where to write it."""
        with passing():
            key = self._overlay.followed(key)
            entry = self._overlay.get(key)
            if entry is None or entry.kind == "gone" or new:  # otherwise each append to a log would look it up
                there = self._overlay.exists(key)
                if new and there:
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
                if must_exist and not there:
                    raise missing(path)
                self._check_folder(key, path)
            return key, self._overlay.begin(key, keep)


def _close(result: Any) -> None:
    """Close the result of a read, if it is a file."""
    if hasattr(result, "close"):
        result.close()
