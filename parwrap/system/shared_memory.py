"""Memory that processes of one node share, in an unnamed file, so that it disappears however they end."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO

__all__ = ["private_file", "shared_file", "shared_memory"]


def shared_memory(store: Any, rank: int, among: Sequence[int], size: int) -> mmap.mmap:
    """Zeroed memory of ``size`` bytes that the ranks ``among`` share; the arguments are those of :func:`shared_file`."""
    file = shared_file(store, rank, among, size)
    try:
        return mmap.mmap(file, size)
    finally:
        os.close(file)


def shared_file(store: Any, rank: int, among: Sequence[int], size: int) -> int:
    """A descriptor of a zeroed file of ``size`` bytes, which each of the ranks ``among`` opens.

    Args:
        store: the store that they find it through.
        rank: this rank.
        among: the ranks that share it, all of this node; the first makes it.
        size: its size in bytes.
    """
    owner, *others = among
    if rank != owner:
        file = os.open(store.get("memory"), os.O_RDWR)
        store.set(f"memory/{rank}", b"")
        return file
    with _nameless(size) as (file, path):
        store.set("memory", path)
        if others:
            store.wait([f"memory/{other}" for other in others])
        return os.dup(file)


def private_file() -> BinaryIO:
    """A file in memory, if the system supports that, for this process and its forks."""
    return open(os.memfd_create("parwrap"), "w+b") if hasattr(os, "memfd_create") else tempfile.TemporaryFile()


@contextmanager
def _nameless(size: int) -> Iterator[tuple[int, str]]:
    """A file, and a path by which other processes can open it while the block runs."""
    if hasattr(os, "memfd_create"):
        # not in /dev/shm, which is small in containers
        file, name = os.memfd_create("parwrap"), None
    else:
        file, name = tempfile.mkstemp(prefix="parwrap-")
    try:
        os.ftruncate(file, size)
        yield file, name or f"/proc/{os.getpid()}/fd/{file}"
    finally:
        os.close(file)
        if name is not None:
            os.unlink(name)
