"""Which paths are subject to the rule that only rank 0 writes, and the one name under which each is known.

Exempt are what belongs to one process (temporary files, devices) and what is made to be shared (caches), child processes, and
what a rank runs alone. What is done to the others is left to the interceptors.
"""

from __future__ import annotations

import getpass
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from parwrap.group.group import is_alone
from parwrap.rank_zero.per_thread import here, passing

__all__ = ["PathRules", "ancestors"]

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
"""Variables that name a cache, and where it is if they are not set."""

MOST_LINKS = 40
"""How many links are followed, as in Linux; the system itself finds those that lead in circles."""

SLACK = 5
"""Seconds by which the clock of a file system may differ from this machine's."""

_TEMPORARY_OF = re.compile(r"[a-z0-9_]{8}~r(\d+)")
"""What a temporary file of a rank has in its name."""


class PathRules:
    """Tells exempt paths from others, in the process that makes it, until it is closed.

    Args:
        rank: the global rank of this process.
    """

    def __init__(self, rank: int) -> None:
        self.open = True
        self.since = time.time() - SLACK
        """What was changed before this, in seconds since the epoch, was there before the function ran."""
        self._rank = rank
        self._process = os.getpid()
        self._own: set[str] = set()
        self._known: dict[str, bool] = {}
        self._folders: dict[str, str] = {}
        self._links: dict[str, str] = {}
        self._caches: tuple[tuple[str | None, ...], tuple[str, ...]] = ((), ())

    def acts(self) -> bool:
        """Whether what this thread does now is subject to the rule at all."""
        return self.looks() and not is_alone(here=True) and self.in_process()

    def looks(self) -> bool:
        """Whether what this thread does now is looked at."""
        return self.open and not here.passing

    def in_process(self) -> bool:
        """Whether this is the process that made it, not one that was forked since."""
        return os.getpid() == self._process

    def in_child(self, path: Any) -> bool:
        """Whether a process that this one has forked is about to change ``path``, which is subject to the rule."""
        if self.in_process() or not self.looks() or here.every_rank or is_alone() or isinstance(path, int) or _called_by_tempfile():
            return False
        return not self.exempt(self.key(path))

    def writes(self, path: Any, dir_fd: int | None = None) -> str | None:
        """The name of ``path``, which is about to be changed, or ``None`` if that is to happen as it is."""
        if not self.acts() or isinstance(path, int):
            return None
        key = self.key(path, dir_fd)
        if here.every_rank or _called_by_tempfile():
            self.own(key)
            return None
        return None if self.exempt(key) else key

    def key(self, path: Any, dir_fd: int | None = None) -> str:
        """The one name of ``path``: its folder without links, and what it is called there."""
        text = os.fsdecode(path)
        if dir_fd is not None:
            text = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), text)
        folder, name = os.path.split(os.path.abspath(text))
        real = self._folders.get(folder)
        if real is None:
            with passing():
                # for good: what is a link and what is not must not depend on how far rank 0 has come
                real = self._folders[folder] = os.path.realpath(folder)
        return os.path.join(real, name)

    def link(self, key: str, target: str | None) -> None:
        """The path has been made a link to ``target``, or something else."""
        if target is not None:
            self._links[key] = target
        else:
            self._links.pop(key, None)

    def target(self, key: str) -> str | None:
        """What the path was made a link to, if it was."""
        return self._links.get(key)

    def followed(self, key: str) -> str:
        """Where ``key`` leads to by way of links that were made since, itself or those above it."""
        for _ in range(MOST_LINKS if self._links else 0):
            for part in (key, *ancestors(key)):
                if part in self._links:
                    key = os.path.normpath(os.path.join(os.path.dirname(part), self._links[part])) + key[len(part) :]
                    break
            else:
                break
        return key

    def exempt(self, key: str) -> bool:
        """Whether the path of this name is real on every rank."""
        known = self._known.get(key)
        if known is None:
            above = {key, *ancestors(key)}
            known = self._known[key] = not above.isdisjoint((*SYSTEM, *self._cache_roots(), *self._own))
        return known

    def own(self, key: str) -> None:
        """The path of this name, and all below it, belongs to this process from now on."""
        self._own.add(key)
        self._known.clear()

    def temporary_name(self, name: str) -> str:
        """The random part of a temporary file's name, with which it is known as this rank's."""
        return f"{name}~r{self._rank}" if self.looks() else name

    def of_another_rank(self, path: Any) -> bool:
        """Whether ``path`` is a temporary file that another rank has made in this run."""
        marked = _TEMPORARY_OF.search(os.path.basename(os.fsdecode(path)))
        if marked is None or int(marked[1]) == self._rank:
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
    """The folders above ``key``, the nearest first.

    >>> list(ancestors("/a/b/c"))
    ['/a/b', '/a']
    """
    while (key := os.path.dirname(key)) != os.path.dirname(key):
        yield key


def _called_by_tempfile() -> bool:
    """Whether ``tempfile`` makes this call: a look at the frames catches every way to get there, whatever was imported when."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("parwrap.", "wrapt")):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == "tempfile"
