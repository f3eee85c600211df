"""One forked rank: what runs in its own process. Starting and watching it is ``forked.py``'s.

It has all that the caller has, so nothing need be sent to it. It computes with one thread, since OpenMP does not survive a fork in a
process that has computed with several.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from types import FrameType, TracebackType
from typing import Any, BinaryIO, NoReturn

import torch

from parwrap import group as groups
from parwrap.errors import UsageError
from parwrap.processes import die_with_parent
from parwrap.returned import CallersObjects
from parwrap.sites import is_ours
from parwrap.world import World

__all__ = ["ENDING", "End", "Job", "failed", "run"]

ENDING = (signal.SIGINT, signal.SIGTERM)
"""What ends a rank: Ctrl-C, and that another has failed. They are blocked when it begins."""


@dataclass(frozen=True)
class Job:
    """What a rank is to run.

    Attributes:
        function: to call, without arguments.
        world: the rank's place.
        backend: of the process group.
        timeout: for how long it waits for another rank; ``None`` for torch's.
        environ: variables to set first.
        callers: what both sides of the fork know.
        failure: the file for a packed :class:`Raised`; when it is there, its time is sent through ``word``.
        end: the file for a packed :class:`End`, which a 0 is sent for.
        word: to the caller.
        parent: the caller's process.
    """

    function: Callable[[], Any]
    world: World
    backend: str
    timeout: timedelta | None
    environ: Mapping[str, str]
    callers: CallersObjects
    failure: BinaryIO
    end: BinaryIO
    word: Connection
    parent: int


@dataclass(frozen=True)
class End:
    """How a rank ended.

    Attributes:
        value: what it has returned, on rank 0.
        changes: of the caller's objects: on rank 0, and on all ranks that were not to the end.
        leaves: whether it was by ``sys.exit()``.
    """

    value: Any = None
    changes: dict[str, list] | None = None
    leaves: bool = False


class _Stopped(BaseException):
    """Raised in a rank's function to end it, because another rank has failed."""


_job: Job | None = None
_told = False


def run(job: Job) -> None:
    """Run ``job`` in this process, which was forked for it."""
    global _job
    with suppress(PermissionError):
        os.setpgid(0, 0)  # what it starts is ended with it, and Ctrl-C reaches it by way of the caller
    die_with_parent(job.parent)
    signal.signal(signal.SIGTERM, _stop)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    os.environ.update(job.environ)
    if "lo" in [name for _, name in socket.if_nameindex()]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # so that nothing listens beyond this machine
    with suppress(AttributeError, ValueError):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a rank may be killed at any time
    _job = job
    end = _run(job)
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    try:
        job.callers.pack(end, job.end)
    except Exception as error:
        failed(
            UsageError(
                f"what was returned on rank {job.world.rank}, or put into a model of the caller, cannot be sent to the caller: {error}. "
                "Return tensors, models, numbers and containers of them, and define their classes outside of the function."
            )
        )
        job.end.seek(0)
        job.end.truncate()
        job.callers.pack(End(), job.end)
    job.end.flush()
    job.word.send(0.0)


def _run(job: Job) -> End:
    value, leaves, through = None, False, False
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        with groups.opened(job.world, job.backend, job.timeout):
            try:
                value = job.function()
            except BaseException as error:
                failed(error)
                raise
        through = True
    except SystemExit as error:
        leaves = through = not error.code
    except BaseException as error:
        failed(error)
    changes = job.callers.changes() if job.world.rank == 0 or not through else None
    return End(value if job.world.rank == 0 else None, changes, leaves)


def failed(error: BaseException) -> None:
    """Tell the caller of the forked ranks, if this is one, what was raised here, before what is around it is left.

    Leaving the process group may take other ranks along, whose errors are then not the first.
    """
    global _told
    job = _job
    if job is None or _told or isinstance(error, _Stopped) or (isinstance(error, SystemExit) and not error.code):
        return
    _told = True
    when = time.monotonic()
    job.callers.pack(job.callers.raised(error, _users(error.__traceback__)), job.failure)
    job.failure.flush()
    job.word.send(when)


def _users(traceback: TracebackType | None) -> TracebackType | None:
    """``traceback`` from the first line of the user's on, if there is one."""
    inner = traceback
    while inner is not None and is_ours(inner.tb_frame):
        inner = inner.tb_next
    return inner or traceback


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise _Stopped
