"""Which paths only rank 0 may write, and the unique name of each.

These are exempt: temporary files, devices, shared caches, and what a child process or code that only one rank runs writes.
``writer.py`` and ``scratch.py`` handle the other paths.
"""

from __future__ import annotations

import getpass
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from parwrap.places import module_name, outside_of
from parwrap.ranks.group import is_alone
from parwrap.ranks.platform import path_of

__all__ = ["PathRules", "ancestors", "every_rank_writing", "is_inside", "passing"]

SYSTEM = ("/dev", "/proc", "/sys")

CACHES = {
    "XDG_CACHE_HOME": "~/.cache",
    "TORCH_HOME": "~/.cache/torch",
    "TORCH_EXTENSIONS_DIR": "~/.cache/torch_extensions",
    "HF_HOME": "~/.cache/huggingface",
    "TRITON_CACHE_DIR": "~/.triton",
    "TORCHINDUCTOR_CACHE_DIR": "",
    "MPLCONFIGDIR": "~/.config/matplotlib",
    "PIP_CACHE_DIR": "~/.cache/pip",
    "NUMBA_CACHE_DIR": "",
}
"""Environment variables that name the folder of a cache, each with the default folder; empty if no fixed one exists."""

MOST_LINKS = 40
"""The number of links to follow, as in Linux; the system itself detects cycles."""

SLACK = 0.05
"""Seconds by which the time of a file may be behind ``time.time()``, because kernels use a coarse clock for files."""

_TEMPORARY_OF = re.compile(r"[a-z0-9_]{8}~r(\d+)")
"""The part of a temporary file's name that contains its rank."""


class _Here(threading.local):
    """How many :func:`passing` and :func:`every_rank_writing` blocks this thread is in."""

    passing = 0
    every_rank = 0


_here = _Here()


@contextmanager
def passing() -> Iterator[None]:
    """Let this thread's file calls run unchanged inside the block, because they are parwrap's own."""
    _here.passing += 1
    try:
        yield
    finally:
        _here.passing -= 1


@contextmanager
def every_rank_writing() -> Iterator[None]:
    """Let this thread write files on every rank inside the block."""
    _here.every_rank += 1
    try:
        yield
    finally:
        _here.every_rank -= 1


class PathRules:
    """Decides which paths only rank 0 writes. The rules apply in the process that creates them, as long as ``open`` is true.

    Args:
        rank: the global rank of this process.
        since: when the run began, in seconds since the epoch; by default now.
    """

    def __init__(self, rank: int, since: float | None = None) -> None:
        self.open = True
        self.since = time.time() - SLACK if since is None else since
        """A file that last changed before this time, in seconds since the epoch, existed before the function ran."""
        self.known_path: Callable[[str], str] = str
        """Returns the path that the script knows for the real path of an open folder."""
        self._rank = rank
        self._process = os.getpid()
        self._own: set[str] = set()
        self._known: dict[str, bool] = {}
        self._folders: dict[str, str] = {}
        self._links: dict[str, str] = {}
        self._caches: tuple[tuple[str | None, ...], tuple[str, ...]] = ((), ())

    def acts(self) -> bool:
        """Whether the rules apply to this thread now: not in a forked process, in ``passing()``, or in code that only this rank runs."""
        return self.looks() and not is_alone() and self.in_process()

    def looks(self) -> bool:
        """Whether this thread's calls are intercepted now."""
        return self.open and not _here.passing

    def in_process(self) -> bool:
        """Whether this process created the rules, and was not forked later."""
        return os.getpid() == self._process

    def writes(self, path: Any, dir_fd: int | None = None, alone: bool = False) -> str | None:
        """Called before a call changes ``path``. Returns its unique name if only rank 0 may write it; otherwise ``None``.

        A path that every rank writes, or that ``tempfile`` makes, is exempt from now on. If ``alone``, the name is that of a path that
        code changes which only this rank runs.
        """
        if not self.looks() or is_alone() != alone or not self.in_process() or isinstance(path, int):
            return None
        key = self.key(path, dir_fd)
        if _here.every_rank or _called_by_tempfile():
            self.own(key)
            return None
        return None if self.exempt(key) else key

    def key(self, path: Any, dir_fd: int | None = None) -> str:
        """The unique name of ``path``, which is relative to ``dir_fd`` if given: its folder with links resolved, and its last part."""
        text = os.fsdecode(path)
        if dir_fd is not None:
            text = os.path.join(self.known_path(path_of(dir_fd)), text)
        folder, name = os.path.split(os.path.abspath(text))
        real = self._folders.get(folder)
        if real is None:
            with passing():
                # cached for good: whether a path is a link must not depend on how far rank 0 is
                real = self._folders[folder] = os.path.realpath(folder)
        return os.path.join(real, name)

    def link(self, key: str, target: str | None) -> None:
        """Record that the path named ``key`` is now a symbolic link to ``target``, or no link if ``target`` is ``None``."""
        if target is not None:
            self._links[key] = target
        else:
            self._links.pop(key, None)

    def target(self, key: str) -> str | None:
        """The target of the symbolic link that :meth:`link` recorded at the path named ``key``, if any."""
        return self._links.get(key)

    def followed(self, key: str) -> str:
        """Where ``key`` leads through the links that :meth:`link` recorded, at the path itself or above it."""
        for _ in range(MOST_LINKS if self._links else 0):
            for part in (key, *ancestors(key)):
                if part in self._links:
                    key = os.path.normpath(os.path.join(os.path.dirname(part), self._links[part])) + key[len(part) :]
                    break
            else:
                break
        return key

    def exempt(self, key: str) -> bool:
        """Whether every rank reads and writes the path named ``key`` directly on the disk."""
        known = self._known.get(key)
        if known is None:
            above = {key, *ancestors(key)}
            free = not above.isdisjoint((*SYSTEM, *self._cache_roots(), *self._own))
            known = self._known[key] = free or any(self._rank_of(each) == self._rank for each in above)
        return known

    def own(self, key: str) -> None:
        """Exempt the path named ``key``, and all paths below it, from now on, because it belongs to this process."""
        self._own.add(key)
        self._known.clear()

    def temporary_name(self, name: str) -> str:
        """Add this rank's mark to ``name``, the random part of a temporary file's name, if this thread's calls are intercepted."""
        return f"{name}~r{self._rank}" if self.looks() else name

    def _rank_of(self, path: Any) -> int | None:
        """The rank that the name of a temporary file belongs to; ``None`` for any other name."""
        marked = _TEMPORARY_OF.search(os.path.basename(os.fsdecode(path)))
        return None if marked is None else int(marked[1])

    def of_another_rank(self, path: Any) -> bool:
        """Whether ``path`` is a temporary file that another rank has made in this run."""
        if self._rank_of(path) in (None, self._rank):
            return False
        try:
            return os.lstat(path).st_ctime >= self.since
        except FileNotFoundError:
            return True  # the other rank has removed it in the meantime

    def _cache_roots(self) -> tuple[str, ...]:
        values = tuple(os.environ.get(variable) for variable in ("HOME", "TMPDIR", *CACHES))
        if self._caches[0] != values:
            named = [value or default for value, default in zip(values[2:], CACHES.values(), strict=True)]
            with suppress(KeyError, OSError):  # a user without a name
                user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
                named.append(os.path.join(tempfile.gettempdir(), f"torchinductor_{user}"))
            with passing():
                self._caches = values, tuple(os.path.realpath(os.path.expanduser(name)) for name in named if name)
        return self._caches[1]


def ancestors(key: str) -> Iterator[str]:
    """The folders above ``key`` without the root, the nearest first.

    >>> list(ancestors("/a/b/c"))
    ['/a/b', '/a']
    """
    while (key := os.path.dirname(key)) != os.path.dirname(key):
        yield key


def is_inside(path: str, folder: str) -> bool:
    """Whether ``path`` is in ``folder``, at any depth."""
    return path.startswith(folder + os.sep)


def _called_by_tempfile() -> bool:
    """Whether the module ``tempfile`` makes the file call that is running, according to the stack."""
    frame = outside_of(sys._getframe(2), "parwrap", "wrapt")
    return frame is not None and module_name(frame) == "tempfile"
