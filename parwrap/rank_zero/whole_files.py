"""Files that appear as a whole or not at all: they are written beside their path and renamed, also on one rank.

A process that is killed while it writes leaves a folder beside the path. The next script that parwrap starts for the same user removes it.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from parwrap.errors import LaunchError
from parwrap.intercept.patch import installed
from parwrap.rank_zero.calls import save_patches
from parwrap.rank_zero.listing import PART
from parwrap.rank_zero.native_calls import native_patches
from parwrap.ranks.platform import lock
from parwrap.ranks.rendezvous import private_folder

__all__ = ["remove_left", "saved_whole", "write_whole"]

NOTE = "part-"
"""The prefix of the files in the private folder that name a folder in which a file is being written. Their writers lock them."""


def write_whole(path: Any, write: Callable[[Any], Any]) -> Any:
    """Let ``write`` write to a temporary path, then rename it to ``path``. Both have the same file name, because torch stores that name.

    A device, a file with several names, and a file in a read-only folder are written directly.
    """
    path = os.path.realpath(path)
    before = os.stat(path) if os.path.exists(path) else None
    if before is not None and (not stat.S_ISREG(before.st_mode) or before.st_nlink > 1):
        return write(path)  # a device or a pipe cannot be renamed over, and another name of the file keeps its content
    folder, name = os.path.split(path)
    temporary = os.path.join(os.fsdecode(folder), f"{PART}{secrets.token_hex(4)}")
    with _noted(temporary):
        try:
            os.mkdir(temporary, 0o700)
        except OSError:
            return write(path)  # a writable file may lie in a read-only folder; otherwise torch reports the error
        try:
            part = os.path.join(temporary, os.fsdecode(name))
            result = write(part)
            if before is not None:
                os.chmod(part, stat.S_IMODE(before.st_mode))
            os.replace(part, path)
            return result
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _noted(temporary: str) -> Iterator[None]:
    """Inside the block, a note says that ``temporary`` is to be removed if this process is killed."""
    descriptor = note = None
    with suppress(LaunchError, OSError):  # without a private folder, nothing is noted
        note = private_folder() / f"{NOTE}{secrets.token_hex(8)}"
        descriptor = os.open(note, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        lock(descriptor)
        os.write(descriptor, os.fsencode(temporary))
    try:
        yield
    finally:
        if note is not None and descriptor is not None:
            note.unlink(missing_ok=True)
            os.close(descriptor)


def remove_left() -> None:
    """Remove what processes that were killed have left behind."""
    with suppress(LaunchError, OSError):
        for note in private_folder().glob(f"{NOTE}*"):
            with suppress(OSError):  # its writer is alive, or another process removes it
                _remove_noted(note)


def _remove_noted(note: Path) -> None:
    descriptor = os.open(note, os.O_RDWR)
    try:
        lock(descriptor, wait=False)
        temporary = os.fsdecode(os.read(descriptor, 1 << 16))
        if os.path.basename(temporary).startswith(PART):
            shutil.rmtree(temporary, ignore_errors=True)
        note.unlink()
    finally:
        os.close(descriptor)


class _OneRank:
    """The saves of a script on one rank."""

    def save(self, file: Any, write: Callable[[Any], Any], is_checkpoint: Callable[[], bool]) -> Any:
        return write_whole(file, write) if isinstance(file, (str, os.PathLike)) else write(file)

    def read_native(self, path: Any, read: Callable[[Any], Any]) -> Any:
        return read(path)

    def write_native(self, path: Any, mode: str, write: Callable[[Any], Any]) -> Any:
        return write(path)


@contextmanager
def saved_whole(module: str | None) -> Iterator[None]:
    """Inside the block, what ``torch.save`` and safetensors write appears as a whole. ``module`` is as in :func:`installed`."""
    remove_left()
    files = _OneRank()
    with installed([*save_patches(files, lambda thing: False), *native_patches(files, lambda thing: False)], module):
        yield
