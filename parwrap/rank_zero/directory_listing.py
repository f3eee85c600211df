"""Directories as a replica (a rank other than 0) sees them: without what rank 0 has created ahead of it, with the replica's own changes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from parwrap.rank_zero.file_overlay import FileOverlay
from parwrap.rank_zero.file_versions import PART

__all__ = ["Entries", "seen", "seen_entries"]


class SeenEntry:
    """An ``os.DirEntry`` for a path whose content may be elsewhere."""

    def __init__(self, name: Any, path: Any, place: str) -> None:
        self.name, self.path, self._place = name, path, place

    def __fspath__(self) -> Any:
        return self.path

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self._place, follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        return os.lstat(self._place).st_ino

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isdir(self._place) and (follow_symlinks or not self.is_symlink())

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isfile(self._place) and (follow_symlinks or not self.is_symlink())

    def is_symlink(self) -> bool:
        return os.path.islink(self._place)

    def is_junction(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"


class Entries:
    """The result of ``os.scandir``.

    Args:
        entries: objects like ``os.DirEntry``.
        close: a function, called when the iteration ends.
    """

    def __init__(self, entries: Iterator[Any], close: Callable[[], None] = lambda: None) -> None:
        self._entries, self._close = entries, close

    def __iter__(self) -> Entries:
        return self

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> Entries:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())
        self._close()


def seen_entries(path: Any, seen: dict[str, str]) -> Iterator[SeenEntry]:
    """The entries of the directory ``path``; ``seen`` maps the replica's names to where to read them."""
    text = os.fspath(path)
    coded = os.fsencode if isinstance(text, bytes) else str
    return (SeenEntry(coded(name), os.path.join(text, coded(name)), place) for name, place in seen.items())


def seen(overlay: FileOverlay, folder: str, waits: bool = True) -> dict[str, str]:
    """The names in ``folder`` and where to read each.

    Args:
        overlay: the replica's file overlay.
        folder: the key of a directory.
        waits: whether to wait for rank 0 where this rank has changed something.

    Raises:
        FileNotFoundError: the directory does not exist for this rank.
    """
    place = overlay.readable(folder, waits)
    own = overlay.inside(folder)
    try:
        found = _on_disk(overlay, folder, place, own)
    except FileNotFoundError:
        if not (own and overlay.replaced(folder, place)):
            raise
        found = {}  # rank 0 is ahead and has removed it in the meantime
    for name in sorted(own):
        key = os.path.join(folder, name)
        if overlay.exists(key):
            try:
                found[name] = overlay.readable(key, waits)
            except FileNotFoundError:
                continue  # rank 0 has never created it
    return found


def _on_disk(overlay: FileOverlay, folder: str, place: str, own: set[str]) -> dict[str, str]:
    """The names of rank 0 in ``folder`` that this rank may see, without its ``own``. ``place`` is the folder on disk."""
    found = {}
    with os.scandir(place) as real:
        # a folder's modification time changes with its entries
        recent = os.stat(place).st_ctime >= overlay.since
        for entry in real:
            name = entry.name
            if name in own or name.startswith(PART):
                continue
            if recent and _hidden(overlay, os.path.join(folder, name), entry):
                continue
            found[name] = entry.path
    return found


def _hidden(overlay: FileOverlay, key: str, entry: os.DirEntry) -> bool:
    try:
        return overlay.hidden(key, entry.stat(follow_symlinks=False).st_ctime)
    except FileNotFoundError:
        return True  # rank 0 has removed it in the meantime
