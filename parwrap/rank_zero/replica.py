"""The file calls of ranks above 0: they write to scratch, and ``scratch.py`` decides what they read."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from parwrap.errors import RankMismatchError
from parwrap.places import running_line
from parwrap.rank_zero.calls import Change, Opening, writes
from parwrap.rank_zero.journal import Progress, Sites
from parwrap.rank_zero.last_read import LastRead
from parwrap.rank_zero.listing import Entries, SeenEntry, is_link
from parwrap.rank_zero.path_rules import passing
from parwrap.rank_zero.scratch import FILE, FOLDER, HIDDEN, LINK, MARK, NAP, Entry, Overlay, missing
from parwrap.rank_zero.whole_files import write_whole
from parwrap.rank_zero.writer import KeptReadable, saved_path
from parwrap.ranks.platform import path_of

__all__ = ["ReplicaFiles"]

PATIENCE = 10
"""Seconds to wait for a slower rank 0 to make its changes, before a child process or what every rank writes depends on them."""

MOST_COPIED_FOR_NATIVE = 2**28
"""The maximum size, in bytes, of a file, such as a database, that is copied to scratch before native code changes it."""

MOST_NAMED = 4
"""How many of this rank's files the note on an error names."""

MOST_LINKED = 2**26
"""The maximum size, in bytes, of a file of the disk that ``os.link`` copies. Larger ones are read where they are."""


class ReplicaFiles:
    """The file calls of a rank above 0, or of rank 0 if it writes to scratch too.

    Args:
        overlay: the files of this rank.
        progress: the changes that all ranks have made.
        stands_in: on the first rank of a node without rank 0, keeps the checkpoints that this rank saves for its node; else ``None``.
    """

    def __init__(self, overlay: Overlay, progress: Progress, stands_in: KeptReadable | None) -> None:
        self._overlay, self._rules, self._progress, self._stands_in = overlay, overlay.rules, progress, stands_in
        self.last_read = LastRead()
        self._sites = Sites()
        self._is_patient = True
        self._in_scratch = False  # whether the real working directory is a folder in scratch

    def close(self) -> None:
        """Let all calls run unchanged from now on, and remove this rank's scratch files."""
        self._rules.open = False
        with passing():
            if self._stands_in is not None:
                self._stands_in.close()
            self._progress.close()
            with suppress(OSError):  # the directory was removed
                if self._overlay.owns(os.getcwd()):
                    os.chdir(self._overlay.known_path(os.getcwd()))
            self._overlay.close()

    def crossed(self) -> None:
        """Show this rank what is on the disk now, after all ranks have passed a barrier."""
        with passing():
            self._overlay.crossed()

    @contextmanager
    def running_alone(self) -> Iterator[None]:
        """Run the block as it is: only what rank 0 runs alone is recorded in the journal."""
        yield

    def left_alone(self) -> None:
        """Record that this rank skips something that rank 0 runs alone, so that this rank sees the files which rank 0 makes there."""
        self._overlay.leave_alone(running_line())

    def written(self) -> list[str]:
        """The names of the files that only this rank sees, the last few that it has written."""
        return [os.path.basename(key) for key in self._overlay.files()[-MOST_NAMED:]]

    def open(self, call: Opening) -> Any:
        if isinstance(call.file, int) or call.opener is not None or not self._rules.looks():
            return call.run()
        if not call.writes:
            if not self._overlay.may_differ(call.file):
                with suppress(FileNotFoundError):
                    stream = call.run()
                    if self._overlay.shows(os.fstat(stream.fileno())):
                        return stream
                    stream.close()
            return self._on(lambda: self._content(call.file), lambda place: _named(call._replace(file=place).run(), call.file, place))
        key = self._written(call.file)
        if key is None:
            return call.run()
        kinds = set(call.mode)
        with passing():
            if not call.is_valid:
                return call.run()  # raises what it raises for rank 0
            self._progress.count()
            place = self._begin(key, call.file, keep=bool(kinds & set("ar")), new="x" in kinds, must_exist="r" in kinds)
            return _named(call._replace(file=place, mode=call.mode.replace("x", "w")).run(), call.file, place)

    def open_descriptor(self, original: Callable, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        """``os.open``: like ``open``."""
        if not writes(flags):
            return self._on(
                lambda: self._content(path, dir_fd), lambda place: original(place, flags, mode, dir_fd=dir_fd if place is path else None)
            )
        key = self._written(path, dir_fd)
        if key is None:
            return original(path, flags, mode, dir_fd=dir_fd)
        with passing():
            self._progress.count()
            new = bool(flags & os.O_CREAT and flags & os.O_EXCL)
            place = self._begin(key, path, keep=not flags & os.O_TRUNC, new=new, must_exist=not flags & os.O_CREAT)
            return original(place, (flags | os.O_CREAT) & ~os.O_EXCL, mode)

    def look(self, name: str, original: Callable, path: Any, args: tuple, kwargs: dict) -> Any:
        """``os.stat`` and similar calls."""
        if isinstance(path, int) or not self._rules.looks():
            result = original(path, *args, **kwargs)
            if name in ("chdir", "fchdir") and isinstance(path, int):
                self._in_scratch = self._overlay.owns(path_of(path))
            return result
        if name != "chdir" and not kwargs.get("dir_fd") and not self._overlay.may_differ(path):
            with suppress(FileNotFoundError):
                result = original(path, *args, **kwargs)
                if type(result) is os.stat_result and self._overlay.shows(result):
                    return result
        follow, folder = name not in ("lstat", "readlink") and kwargs.get("follow_symlinks", True), kwargs.get("dir_fd")

        def run(place: Any) -> Any:
            if name in ("stat", "lstat"):
                with suppress(RankMismatchError, FileNotFoundError), passing():  # rank 0 may have replaced the checkpoint since
                    if (saved := self._overlay.content(place)) is not place:
                        return os.stat(saved)  # a descriptor of rank 0 looks like a link
            if name in ("stat", "lstat", "readlink") and place is not path and not follow and place.startswith("/proc/"):
                if name == "readlink":  # a descriptor of rank 0 looks like a link
                    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
                return os.stat(place)
            dropped = () if place is path else ("dir_fd",)
            result = original(place, *args, **{key: value for key, value in kwargs.items() if key not in dropped})
            if name == "chdir":
                self._in_scratch = self._overlay.owns(place)
            return result

        try:
            return self._on(lambda: self._read(path, follow, folder), run)
        except FileNotFoundError:
            if name == "access":
                return False
            raise

    def listing(self, name: str, original: Callable, path: Any, args: tuple, kwargs: dict) -> Any:
        """``os.listdir`` and ``os.scandir``: sorted, so that all ranks have the same order."""
        path = "." if path is None else path
        if not self._looks():
            return original(path)
        acts = self._rules.acts()
        with passing():
            folder = self._overlay.known_path(path_of(path)) if isinstance(path, int) else path
            key = self._rules.key(folder)
            if acts and not self._rules.exempt(key):
                key = self._overlay.resolved(key)
                place = self._overlay.existing(key, path)
                names = self._overlay.names(key) if os.path.isdir(place) else original(place)
            else:
                names = [os.fsdecode(each) for each in sorted(os.listdir(path))]
            text = os.fspath(folder)
            coded = os.fsencode if isinstance(text, bytes) else str
            if name == "listdir":
                return [coded(each) for each in names]
            places = [self._overlay.find(os.path.join(key, each)) or os.path.join(key, each) for each in names]
            shown = None if isinstance(path, int) else text
            found = zip(names, places, strict=True)
            return Entries(SeenEntry(coded(each), shown, os.path.join(text, coded(each)), place) for each, place in found)

    def attribute(self, name: str, original: Callable, path: Any, args: tuple, kwargs: dict) -> Any:
        """``os.chmod``, ``os.utime`` and similar calls: on paths that only rank 0 writes, they change only scratch files."""
        key = self._written(path, kwargs.get("dir_fd"))
        if key is None:
            return original(path, *args, **kwargs)
        with passing():
            place = self._overlay.existing(self._overlay.resolved(key), path)
            if not self._overlay.owns(place):
                return None
            return original(place, *args, **{name: value for name, value in kwargs.items() if name != "dir_fd"})

    def change(self, change: Change) -> Any:
        """Make, remove or move paths for this rank."""
        if not self._rules.acts():
            self._written(*(change.made or change.gone))  # type: ignore[misc]
            return change.run()
        gone, made = (self._written(*path) if path else None for path in (change.gone, change.made))
        if gone is None and made is None:
            if change.name == "copyfile":
                self._copy_out(change)
                return change.made[0]  # type: ignore[index]
            return change.run()
        with passing():
            form = {"replace": "rename", "unlink": "remove"}.get(change.name, change.name)
            try:
                return getattr(self, f"_{form}")(change, gone, made)
            finally:
                self._progress.count()

    def working_directory(self, original: Callable[[], str]) -> str:
        return self._overlay.known_path(original()) if self._rules.open else original()

    def temporary_name(self, name: str) -> str:
        return self._rules.temporary_name(name)

    def run_command(self, run: Callable[[], Any], command: Any) -> Any:
        """Run a child process. This rank sees the files that the child makes."""
        self._overlay.child_began()
        with passing():  # rank 0 may be about to remove, make or close what the child writes or reads
            self._wait_while(lambda: self._progress.is_behind() or self._overlay.closes_late())
        return run()

    def save(self, file: Any, write: Callable[[Any], Any], is_checkpoint: Callable[[], bool]) -> Any:
        """``torch.save``: writes a marker for a checkpoint, because that is large and rank 0 writes the same.

        It writes all of a checkpoint with ``stands_in``, and of whatever is no checkpoint.
        """
        path = saved_path(file)
        key = self._written(path) if path is not None else None
        if key is None:
            if path is not file or not self._rules.looks():
                return write(file)
            with passing():
                return write_whole(file, write)
        if not is_checkpoint():
            return self.write_native(file, "w", write) if path is file else write(file)
        with passing():
            try:
                place = self._begin(key, path, keep=path is not file)
            except FileNotFoundError:
                return write(os.path.join(self._overlay.fresh(key), "none"))  # raises what it raises for rank 0
            save = self._sites.next()
            if self._stands_in is None:
                self._mark(place if path is file else file, save)
            else:
                write(place if path is file else file)
                if path is not file:
                    file.flush()
                self._stands_in.save(save, place)
            self._progress.count()
            return None

    def _mark(self, file: Any, save: str) -> None:
        """Write the marker of ``save``, a name from :class:`Sites`, to a path or an open file."""
        with open(file, "wb") if isinstance(file, str) else nullcontext(file) as marker:
            marker.write(MARK + save.encode() + b"\n")

    def read_native(self, path: Any, read: Callable[[Any], Any]) -> Any:
        """Run native code that reads a file, from where this rank sees it. It reports a missing file itself, unless that is hidden."""

        def find() -> Any:
            try:
                return self._content(path)
            except FileNotFoundError as error:
                if HIDDEN in str(error):
                    raise
                return os.path.join(self._overlay.scratch, "0", os.path.basename(os.fsdecode(path))) if os.path.lexists(path) else path

        def run(place: Any) -> Any:
            with nullcontext() if place is path else passing():  # rank 0's file may be one that is hidden
                return read(place)

        return self._on(find, run)

    def write_native(self, path: Any, mode: str, write: Callable[[Any], Any]) -> Any:
        """Run native code that writes a file: to scratch, or to the disk if every rank writes the path.

        It also writes to the disk if it changes a file that is too large to copy.
        """
        key = self._written(path)
        if key is None:
            return write(path)
        with passing():
            self._progress.count()
            keep = not set(mode) & set("wx-")
            place = self._overlay.find(self._overlay.resolved(key))
            if keep and place and not self._overlay.owns(place) and os.path.getsize(place) > MOST_COPIED_FOR_NATIVE:
                return write(path)
            try:
                place = self._begin(key, path, keep, new=bool(set(mode) & set("x-")), must_exist="r" in mode)
            except FileNotFoundError:
                place = os.path.join(self._overlay.fresh(key), "none")  # the native code reports the error
            return write(place)

    def _looks(self) -> bool:
        """Whether this thread sees this rank's files. A forked child does too, but its writes go to the disk."""
        return self._rules.looks() and (self._rules.acts() or not self._rules.in_process())

    def _read(self, path: Any, follow: bool = True, dir_fd: int | None = None) -> Any:
        """Where ``path`` is for this rank.

        Raises:
            FileNotFoundError: it does not exist for this rank.
        """
        if isinstance(path, int) or not self._looks():
            return path
        with passing():
            named = self._rules.key(path, dir_fd)
            if self._rules.exempt(named):
                return path
            key = self._overlay.resolved(named) if follow else self._overlay.at(named)
            if self._rules.exempt(key):
                return key
            place = self._overlay.existing(key, path)
            self._overlay.check_kept(place)
            return path if place == named and not self._in_scratch else place  # a relative path starts at the real working directory

    def _content(self, path: Any, dir_fd: int | None = None) -> Any:
        """Where the content of ``path`` is for this rank: as :meth:`_read`; if that is a marker, the file that rank 0 has saved."""
        place = self._read(path, dir_fd=dir_fd)
        with passing():
            return self._overlay.content(place)

    def _on(self, find: Callable[[], Any], run: Callable[[Any], Any]) -> Any:
        """``run(find())``, and both again if rank 0 has moved or removed the path between them."""
        place = find()
        try:
            return run(place)
        except FileNotFoundError:
            if (again := find()) == place:
                raise
            return run(again)

    def _written(self, path: Any, dir_fd: int | None = None) -> str | None:
        """The key of a path that is about to change, or ``None`` if the call runs unchanged, on the disk.

        If it runs unchanged, the path's folder is made on the disk if it is only in scratch.
        """
        key = self._rules.writes(path, dir_fd)
        if key is None and self._rules.looks() and not isinstance(path, int):
            with passing():
                self._make_real(os.path.dirname(self._rules.key(path, dir_fd)))
        return key

    def _make_real(self, folder: str) -> None:
        """Make ``folder`` on the disk too if it is only in scratch, after waiting a while for rank 0 to make it."""
        entry = self._overlay.entry(folder)
        if entry is None or entry.kind != FOLDER:
            return
        self._wait_while(lambda: self._progress.is_behind() and not os.path.isdir(folder))
        os.makedirs(folder, exist_ok=True)

    def _wait_while(self, is_behind: Callable[[], bool]) -> None:
        """Wait a while for a slower rank 0. If it does not come that far, this rank makes changes of its own, and never waits again."""
        until = time.monotonic() + PATIENCE
        while self._is_patient and is_behind():
            self._is_patient = time.monotonic() < until
            time.sleep(NAP)

    def _begin(self, key: str, path: Any, keep: bool, new: bool = False, must_exist: bool = False) -> str:
        """The place in scratch where this rank writes the file with ``key``.

        Args:
            key: the unique name of the path.
            path: the path as the script gives it, for errors.
            keep: whether the place begins with the file's present content.
            new: whether it is an error if the file exists.
            must_exist: whether it is an error if the file does not exist.
        """
        overlay, key = self._overlay, self._overlay.resolved(key)
        place = overlay.find(key)
        if place is None:
            if must_exist:
                raise missing(path)
            self._check_folder(key, path)
        elif new:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        elif os.path.isdir(place):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        elif overlay.owns(place) and not (keep and overlay.marked(place)):
            return place
        fresh = overlay.fresh(key)
        before = None
        while keep and place and place != before:  # rank 0 may change the file while it is copied: its old content is elsewhere then
            before = place
            self._on(lambda: overlay.content(overlay.existing(key, path)), lambda content: shutil.copy(content, fresh))
            place = overlay.find(key)
        overlay.record(key, Entry(FILE, fresh))
        return fresh

    def _check_folder(self, key: str, path: Any) -> None:
        """Check that the folder of a new path exists."""
        self._overlay.existing(self._overlay.resolved(os.path.dirname(key)), path)

    def _free(self, made: str, path: Any) -> str:
        """The key of the path ``made``, after a check that nothing exists there and that its folder does."""
        key = self._overlay.at(made)
        if self._overlay.find(key) is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        self._check_folder(key, path)
        return key

    def _mkdir(self, change: Change, gone: None, made: str) -> None:
        key = self._overlay.at(made)
        if self._overlay.may_be_made_ahead(key):
            return
        self._overlay.make_folder(self._free(made, change.made[0]))  # type: ignore[index]

    def _truncate(self, change: Change, gone: None, made: str) -> None:
        os.truncate(self._begin(made, change.made[0], keep=True, must_exist=True), *change.options[0])  # type: ignore[index]

    def _remove(self, change: Change, gone: str, made: None) -> None:
        key, path = self._overlay.at(gone), change.gone[0]  # type: ignore[index]
        place = self._overlay.existing(key, path)
        if os.path.isdir(place) and not is_link(place):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        self._overlay.remove(key)

    def _rmdir(self, change: Change, gone: str, made: None) -> None:
        key, path = self._overlay.at(gone), change.gone[0]  # type: ignore[index]
        if not os.path.isdir(self._overlay.existing(key, path)):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        if self._overlay.names(key):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        self._overlay.remove_tree(key)

    def _rmtree(self, change: Change, gone: str, made: None) -> None:
        """``shutil.rmtree``. The original never runs here, because it works with descriptors and would remove files of rank 0."""
        key, path = self._overlay.at(gone), change.gone[0]  # type: ignore[index]
        (ignore, onerror, *_), options = (*change.options[0], False, None), change.options[1]
        place = self._overlay.find(key)
        if place is not None and not os.path.lexists(place):  # rank 0 has removed it in the meantime
            place = self._overlay.find(key)
        if place is not None and os.path.isdir(place) and not is_link(place):
            self._overlay.remove_tree(key)
        elif not options.get("ignore_errors", ignore):
            error = missing(path) if place is None else NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
            if on_exc := options.get("onexc"):
                on_exc(os.lstat, path, error)
            elif on_error := options.get("onerror", onerror):
                on_error(os.lstat, path, (type(error), error, None))
            else:
                raise error

    def _symlink(self, change: Change, gone: None, made: str) -> None:
        key = self._free(made, change.made[0])  # type: ignore[index]
        place = self._overlay.fresh(key)
        os.symlink(change.target, place)
        self._overlay.record(key, Entry(LINK, place), os.fsdecode(change.target))

    def _link(self, change: Change, gone: None, made: str) -> None:
        path, descriptor = change.source  # type: ignore[misc]
        key = self._free(made, change.made[0])  # type: ignore[index]
        place = self._overlay.existing(self._overlay.at(self._rules.key(path, descriptor)), path)
        fresh = self._overlay.fresh(key)
        if self._overlay.owns(place):
            os.link(place, fresh)
        elif os.path.getsize(place) <= MOST_LINKED:
            shutil.copy(place, fresh)
        else:
            fresh = place
        self._overlay.record(key, Entry(FILE, fresh))

    def _copyfile(self, change: Change, gone: None, made: str) -> Any:
        """``shutil.copyfile``: the copy of a marker is a marker."""
        source, path = change.source[0], change.made[0]  # type: ignore[index]
        key = self._overlay.resolved(self._rules.key(source))
        with_marks = source if self._rules.exempt(key) else self._overlay.existing(key, source)
        if os.path.isdir(with_marks):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), source)
        if self._rules.key(source) == self._rules.key(path):
            raise shutil.SameFileError(f"{source!r} and {path!r} are the same file")
        place = self._begin(made, path, keep=False)
        save = self._sites.next()
        if self._overlay.marked(with_marks) is None:
            exempt = with_marks is source
            self._on(
                lambda: source if exempt else self._overlay.content(self._overlay.existing(key, source)),
                lambda content: shutil.copyfile(content, place),
            )
            if self._stands_in is not None and self._stands_in.is_checkpoint(with_marks):
                self._stands_in.save(save, place)
        else:
            self._mark(place, save)
        return path

    def _copy_out(self, change: Change) -> None:
        """``shutil.copyfile`` to a path that every rank writes."""
        source = self._content(change.source[0])  # type: ignore[index]
        with passing():
            shutil.copyfile(source, change.made[0], **change.options[1])  # type: ignore[index]

    def _rename(self, change: Change, gone: str | None, made: str | None) -> None:
        """``os.rename`` and ``os.replace``, where either path may be one that every rank writes."""
        source, path = change.gone[0], change.made[0]  # type: ignore[index]
        if gone is None:
            key = self._overlay.at(made)  # type: ignore[arg-type]
            self._check_folder(key, path)
            fresh = self._overlay.fresh(key)
            shutil.move(source, fresh)
            self._overlay.record(key, Entry(FOLDER if os.path.isdir(fresh) else FILE, fresh))
            return
        gone = self._overlay.at(gone)
        place = self._overlay.existing(gone, source)
        if made is None:
            self._copy_tree(gone, os.fspath(path))
            self._overlay.remove_tree(gone)
            return
        made = self._overlay.at(made)
        self._check_folder(made, path)
        if made == gone:
            return
        there = self._overlay.find(made)
        if there is not None and os.path.isdir(there) and not is_link(there):
            if not os.path.isdir(place):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), source, None, path)
            if self._overlay.names(made):
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), source, None, path)
        self._overlay.move(gone, made)

    def _copy_tree(self, key: str, to: Any) -> None:
        """Copy the file or folder with ``key`` to a path that every rank writes."""
        place = self._overlay.existing(key, key)
        if not os.path.isdir(place):
            shutil.copy(self._overlay.content(place), to)
            return
        os.makedirs(to, exist_ok=True)
        for name in self._overlay.names(key):
            self._copy_tree(os.path.join(key, name), os.path.join(os.fsdecode(to), name))


def _named(stream: Any, name: Any, place: Any) -> Any:
    """``stream``, which was opened at ``place``, with the script's path ``name`` as its attribute ``name``."""
    if place is not name:
        raw = getattr(stream, "buffer", stream)
        getattr(raw, "raw", raw).name = name
    return stream
