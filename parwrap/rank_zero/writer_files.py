"""The interceptor of rank 0's files: every call runs unchanged, and each new version of a path is announced to the replicas."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

from parwrap.coordination.call_site import location, warn
from parwrap.group.group import Group
from parwrap.intercept.disk import WRITING, Change, Opening
from parwrap.intercept.interceptor import intercepts
from parwrap.rank_zero.child_processes import Processes
from parwrap.rank_zero.directory_listing import Entries
from parwrap.rank_zero.file_versions import PART, Announced
from parwrap.rank_zero.open_files import is_too_large, is_valid, opened, writes
from parwrap.rank_zero.path_rules import PathRules
from parwrap.rank_zero.per_thread import here, passing
from parwrap.rank_zero.rank_files import RankFiles

__all__ = ["WriterFiles"]


class WriterFiles(RankFiles):
    """Announces every version of a file that replicas may wait for.

    Args:
        group: the process group.
    """

    def __init__(self, group: Group) -> None:
        self._announced = Announced(group, group.key("files"))
        self._processes = Processes(group.world.size)
        super().__init__(PathRules(group.world.rank), self._announced.finish)

    def close(self) -> None:
        """Let all calls run unchanged from now on; replicas stop waiting."""
        self._rules.open = False
        self._announced.close()

    @intercepts
    def save(self, file: Any, write: Callable[[Any], None]) -> None:
        """``torch.save``: a file appears as a whole or not at all."""
        if not isinstance(file, (str, os.PathLike)):
            write(file)
            return
        key = self._written(file)
        with self._version(key), passing():
            if key is not None:
                self._announced.saves(location())
            _write_atomically(os.fspath(file), write)

    @intercepts
    def read_native(self, path: Any, read: Callable[[Any], Any]) -> Any:
        """Run native code that reads a file."""
        return read(path)

    @intercepts
    def write_native(self, path: Any, write: Callable[[Any], Any]) -> Any:
        """Run native code that writes a whole file."""
        with self._version(self._written(path)), passing():
            return _write_atomically(os.fsdecode(path), write)

    @intercepts
    def update_native(self, path: Any, update: Callable[[Any], Any]) -> Any:
        """Run native code that changes a file for an unknown time, and keep the old content for slower ranks."""
        key = self._written(path)
        if key and is_too_large(path):
            warn(
                f"parwrap: {location()} opens {os.fsdecode(path)} on every rank, and the file is too large to copy for each of the other "
                "ranks. Reading it is fine. If the script writes to it, open it in a function decorated with @parwrap.rank_zero_only."
            )
            return update(path)
        with self._version(key, replaces=False):
            return update(path)

    @intercepts
    def open_native(self, path: Any, mode: str, open_at: Callable[[Any, Callable[[], None] | None], Any]) -> Any:
        """Run native code that opens a file; ``open_at`` takes the path and a function to call when the file is closed."""
        key = self._written(path) if writes(mode) else None
        if key is None:
            return open_at(path, None)
        with self._begun(key, replaces="w" in mode, in_place=True):
            return open_at(path, partial(self._finish, key))

    @intercepts
    def open(self, call: Opening) -> Any:
        """``open``: a written file is announced when it is closed."""
        # an opener may open another path: tempfile passes the folder
        if not writes(call.mode) or call.opener is not None or not is_valid(call):
            return call.run()
        key = self._descriptors.pop(call.file, None) if isinstance(call.file, int) and call.closefd else self._written(call.file)
        if key is None:
            return call.run()
        if isinstance(call.file, int):
            return opened(call, call.file, partial(self._finish, key))
        with self._begun(key, replaces="w" in call.mode, in_place=True):
            return opened(call, call.file, partial(self._finish, key))

    @intercepts
    def open_descriptor(self, original: Callable, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        """``os.open``: a written file is announced when it is closed."""
        key = self._written(path, dir_fd) if flags & WRITING else None
        if key is None:
            return original(path, flags, mode, dir_fd=dir_fd)
        with self._begun(key, replaces=bool(flags & os.O_TRUNC), in_place=True):
            descriptor = original(path, flags, mode, dir_fd=dir_fd)
        self._descriptors[descriptor] = key
        return descriptor

    @intercepts
    def listing(self, name: str, original: Callable, path: Any, args: tuple, kwargs: dict) -> Any:
        """``os.listdir`` and ``os.scandir``: everything but the temporary files of other ranks."""
        path = "." if path is None else path
        found = original(path)
        if isinstance(path, int) or not self._rules.acts():
            return found
        if name == "listdir":
            return [each for each in found if not self._rules.of_another_rank(os.path.join(path, each))]
        return Entries((entry for entry in found if not self._rules.of_another_rank(entry.path)), found.close)

    @intercepts
    def change(self, change: Change) -> Any:
        """Run a call that makes, removes or moves paths, and announce the new versions."""
        gone, made = (self._rules.writes(*path) if path else None for path in (change.gone, change.made))
        if change.name == "mkdir" and made and os.path.lexists(made):
            return change.run()  # the call fails
        moved = [key for key in self._announced.below(gone) if os.path.lexists(key)] if gone else []
        with passing(), ExitStack() as versions:
            for key in [made, *(made + key[len(gone) :] for key in moved)] if made else ():  # type: ignore[arg-type]
                versions.enter_context(self._version(key, replaces=change.name != "truncate"))
            for key in [gone, *moved] if gone else ():
                versions.enter_context(self._version(key, gone=True))
            result = change.run()
            self._keep_links(change, gone, made)
            return result

    def _keep_links(self, change: Change, gone: str | None, made: str | None) -> None:
        target = self._rules.target(gone) if gone else change.target and os.fsdecode(change.target)
        if made:
            self._rules.link(made, target)
        if gone:
            self._rules.link(gone, None)

    def _written(self, path: Any, dir_fd: int | None = None) -> str | None:
        """The key of the file that is written when ``path`` is opened for writing; ``None`` if the call runs unchanged."""
        key = self._rules.writes(path, dir_fd)
        if key is None and self._rules.in_child(path):
            self._processes.written(os.fsdecode(path))
        return key and self._rules.followed(key)

    @intercepts
    def run_command(self, command: Any) -> None:
        """Warn of a command that may change files, because ``subprocess`` and ``os.system`` run it on every rank."""
        if self._rules.acts() and not here.every_rank:
            self._processes.command(command)

    @contextmanager
    def _begun(self, key: str, replaces: bool, in_place: bool = False) -> Iterator[None]:
        """Begin a version of ``key``, and cancel it if the block fails."""
        self._announced.begin(key, replaces, in_place)
        try:
            yield
        except BaseException:
            self._announced.cancel(key)
            raise

    @contextmanager
    def _version(self, key: str | None, gone: bool = False, replaces: bool = True) -> Iterator[None]:
        """Begin a version of ``key``, which is complete after the block; do nothing without a key."""
        if key is None:
            yield
            return
        with self._begun(key, replaces):
            yield
        self._announced.finish(key, gone)


def _write_atomically(path: str, write: Callable[[Any], Any]) -> Any:
    """Write to a temporary path, then rename the file to ``path``; the name is the same, because torch stores it in the archive."""
    path = os.path.realpath(path)
    if os.path.exists(path) and not os.path.isfile(path):
        return write(path)  # a device or a pipe cannot be renamed over
    folder, name = os.path.split(path)
    temporary = None
    with suppress(OSError):
        temporary = tempfile.mkdtemp(prefix=PART, dir=folder)
    if temporary is None:
        return write(path)  # a writable file may lie in a read-only folder; otherwise torch reports the error
    try:
        result = write(os.path.join(temporary, name))
        os.replace(os.path.join(temporary, name), path)
        return result
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
