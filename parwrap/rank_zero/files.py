"""Rank 0 writes files; the other ranks write to scratch (contract, rule 8). This file intercepts file calls while a scope is open.

``calls.py`` and ``native_calls.py`` list the intercepted calls. ``writer.py`` answers them on rank 0, ``replica.py`` on the other ranks.
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeAlias

from parwrap.intercept.patch import installed
from parwrap.rank_zero.calls import patches
from parwrap.rank_zero.journal import Journal, JournalReader, Progress
from parwrap.rank_zero.native_calls import native_patches
from parwrap.rank_zero.path_rules import PathRules, passing
from parwrap.rank_zero.replica import ReplicaFiles
from parwrap.rank_zero.scratch import CheckWait, Overlay
from parwrap.rank_zero.trackers import trackers_silent
from parwrap.rank_zero.whole_files import remove_left
from parwrap.rank_zero.writer import CheckSave, KeptReadable, WriterFiles, close_left_open
from parwrap.ranks.group import Group
from parwrap.ranks.world import IN_SCRATCH, World

__all__ = ["Files", "current", "files_in_scratch", "intercepting_files"]

Files: TypeAlias = WriterFiles | ReplicaFiles

_openings = itertools.count()
"""Numbers the times that this process begins to intercept file calls. The numbers are the same on all ranks."""

_current: Files | None = None


def current() -> Files | None:
    """What handles the file calls of the open scope; ``None`` if no scope is open."""
    return _current


@contextmanager
def intercepting_files(
    group: Group,
    module: str | None = None,
    check_wait: CheckWait | None = None,
    is_checkpoint: Callable[[Any], bool] = lambda thing: False,
    check_save: CheckSave | None = None,
) -> Iterator[Files]:
    """Let rank 0 alone write files inside the block; if the variable ``IN_SCRATCH`` is 1, not even rank 0.

    Args:
        group: the process group, with a folder that the ranks of the node share.
        module: the name of the running function's module, as in :func:`installed`.
        check_wait: called now and then while this rank waits for rank 0, with the time when the wait began and what it is for.
        is_checkpoint: whether an object that is saved is a checkpoint; any other is each rank's own.
        check_save: called before rank 0 saves an object, and once it is written, with whether that is a checkpoint; it may raise.

    Yields:
        what handles this rank's file calls; call its ``crossed()`` after each barrier.
    """
    assert group.folder is not None, "a group that parwrap has started"
    folder = group.folder / f"files-{next(_openings)}"
    folder.mkdir(mode=0o700, exist_ok=True)
    close_left_open()
    in_scratch = os.environ.get(IN_SCRATCH) == "1"
    files = _files(group.world, folder, group.timeout.total_seconds(), check_wait or (lambda since, place: None), in_scratch)
    if check_save is not None and isinstance(files, WriterFiles):
        files.check_save = check_save
    with _opened(files, module, is_checkpoint), trackers_silent() if in_scratch else nullcontext():
        yield files


@contextmanager
def files_in_scratch(folder: Path) -> Iterator[None]:
    """Let what this process writes inside the block go to scratch in ``folder``. The process is not a rank."""
    files = _files(World(node_ranks=(0,)), folder, math.inf, lambda since, place: None, in_scratch=True)
    with _opened(files, "__main__", lambda thing: False), trackers_silent():
        yield


@contextmanager
def _opened(files: Files, module: str | None, is_checkpoint: Callable[[Any], bool]) -> Iterator[None]:
    global _current
    before, _current = _current, files
    try:
        with installed([*patches(files, is_checkpoint), *native_patches(files, is_checkpoint)], module):
            yield
    finally:
        _current = before
        files.close()


def _files(world: World, folder: Path, timeout: float, check_wait: CheckWait, in_scratch: bool) -> Files:
    """The object that handles this rank's file calls.

    The first rank of each node writes the journal of its node. If that is not rank 0, its ``torch.save`` also writes the whole
    checkpoint, to scratch; the other ranks of the node write a marker, and load that checkpoint.
    """
    rules = PathRules(world.rank, _began(folder))
    rules.own(os.path.realpath(folder))
    place = world.node_ranks.index(world.rank)  # a launcher's local rank may count within a container
    progress = Progress(folder, place, len(world.node_ranks))
    if world.rank == 0 and not in_scratch:
        remove_left()
        return WriterFiles(rules, Journal(folder), progress, str(folder), world.size)
    scratch = folder / f"scratch-{place}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(mode=0o700)
    with_rank_zero = world.node_rank == 0 and not in_scratch
    overlay = Overlay(rules, JournalReader(folder), progress, os.path.realpath(scratch), with_rank_zero, timeout, check_wait)
    stands_in = KeptReadable(Journal(folder), progress, str(folder)) if place == 0 else None
    return ReplicaFiles(overlay, progress, stands_in)


def _began(folder: Path) -> float:
    """The time when a rank of this node first came here, by the clock of file systems. Files with a later time were changed in this run."""
    with passing():
        begin = folder / "begin"
        with suppress(FileExistsError):
            begin.touch(mode=0o600, exist_ok=False)
        return begin.stat().st_ctime
