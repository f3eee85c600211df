"""Directories as a clone sees them: what is on the disk without what rank 0 has made ahead, with what the clone has made itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from parwrap.rank_zero.file_overlay import FileOverlay
from parwrap.rank_zero.file_versions import PART

__all__ = ["Entries", "seen", "seen_entries"]


class SeenEntry:
    """What ``os.DirEntry`` is, for a path that may be somewhere else than it says."""

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
    """What ``os.scandir`` returns.

    Args:
        entries: what is like ``os.DirEntry``.
        close: is called when no more of them are wanted.
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
    """The entries of the directory ``path``, of which a clone has ``seen`` the names and where to read each."""
    text = os.fspath(path)
    coded = os.fsencode if isinstance(text, bytes) else str
    return (SeenEntry(coded(name), os.path.join(text, coded(name)), place) for name, place in seen.items())


def seen(view: FileOverlay, folder: str, waits: bool = True) -> dict[str, str]:
    """The names in ``folder`` and where to read each.

    Args:
        view: the clone's.
        folder: the key of a directory.
        waits: for rank 0, where this rank has changed something.

    Raises:
        FileNotFoundError: the directory is not there, for this rank.
    """
    place = view.readable(folder, waits)
    own = view.inside(folder)
    try:
        found = _on_disk(view, folder, place, own)
    except FileNotFoundError:
        if not (own and view.replaced(folder, place)):
            raise
        found = {}  # rank 0, which is ahead, has removed it in the meantime
    for name in sorted(own):
        key = os.path.join(folder, name)
        if view.exists(key):
            try:
                found[name] = view.readable(key, waits)
            except FileNotFoundError:
                continue  # rank 0 has never made it
    return found


def _on_disk(view: FileOverlay, folder: str, place: str, own: set[str]) -> dict[str, str]:
    """The names that rank 0 has in ``folder`` and this rank is to see, ``own`` ones left out; ``place`` is the folder on the disk."""
    found = {}
    with os.scandir(place) as real:
        # a folder changes with what is made in it
        recent = os.stat(place).st_ctime >= view.since
        for entry in real:
            name = entry.name
            if name in own or name.startswith(PART):
                continue
            if recent and _hidden(view, os.path.join(folder, name), entry):
                continue
            found[name] = entry.path
    return found


def _hidden(view: FileOverlay, key: str, entry: os.DirEntry) -> bool:
    try:
        return view.hidden(key, entry.stat(follow_symlinks=False).st_ctime)
    except FileNotFoundError:
        return True  # rank 0 has removed it in the meantime
