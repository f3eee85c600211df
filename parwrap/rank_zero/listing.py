"""The entries of a listed folder, like those of ``os.scandir``; their content may be at another path."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

__all__ = ["PART", "Entries", "SeenEntry", "is_link"]

PART = ".parwrap-part-"
"""The prefix of temporary folders in which a checkpoint is being saved. No rank lists these folders."""


def is_link(place: str) -> bool:
    """Whether ``place`` is a symbolic link, and not the path of a descriptor of rank 0, which only looks like one."""
    return not place.startswith("/proc/") and os.path.islink(place)


class SeenEntry:
    """Like ``os.DirEntry``, for a path whose content may be at another path.

    Args:
        name: the name in the folder.
        folder: the folder as the script has named it; ``None`` if by a descriptor.
        at: the path by which the script finds it.
        place: where the content is.
    """

    def __init__(self, name: Any, folder: Any, at: str, place: str) -> None:
        self.name, self._at, self._place = name, at, place
        self.path = name if folder is None else os.path.join(folder, name)

    def __fspath__(self) -> Any:
        return self.path

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self._at, follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        return os.lstat(self._place).st_ino

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return (follow_symlinks or not self.is_symlink()) and os.path.isdir(self._at)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return (follow_symlinks or not self.is_symlink()) and os.path.isfile(self._at)

    def is_symlink(self) -> bool:
        return is_link(self._place)

    def is_junction(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"


class Entries:
    """What ``os.scandir`` returns.

    Args:
        entries: objects like ``os.DirEntry``.
    """

    def __init__(self, entries: Iterable[Any]) -> None:
        self._entries = iter(entries)

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
