"""One launched rank: the code in the rank's own process. ``launching.py`` starts and watches it.

A forked rank has everything that the caller has, so nothing is sent to it. It computes with one thread, because OpenMP does not work after
a fork in a process that has used several threads.
"""

from __future__ import annotations

import os
import signal
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any, NoReturn

import torch

from parwrap.coordination.call_site import is_ours
from parwrap.errors import UsageError
from parwrap.group import group as groups
from parwrap.inline.child_output import redirect_output, refuse_stdin, show_in_notebook
from parwrap.inline.returned_state import SyncedObjects
from parwrap.loop.random_streams import set_state
from parwrap.system.processes import die_with_parent
from parwrap.system.remote_exception import RemoteException
from parwrap.world.world import World

__all__ = ["ENDING", "MESSAGE", "End", "Job", "failed", "run"]

MESSAGE = struct.Struct("d")
"""The format of a message to the caller: the time of a failure, or 0 at the end."""

ENDING = (signal.SIGINT, signal.SIGTERM)
"""Signals that end a rank: Ctrl-C, and another rank's failure. They are blocked when the rank starts."""


@dataclass(frozen=True)
class Job:
    """The task of a rank.

    Attributes:
        load: a function that returns the function to call, without arguments, and the caller's objects, for a rank that trains on a given
            device.
        world: the rank's place.
        backend: the backend of the process group; ``None`` to choose by the device.
        timeout: how long it waits for another rank; ``None`` for torch's timeout.
        environ: variables to set first.
        threads: the number of compute threads; ``None`` for the environment's.
        streams: the states of the random streams to continue from; ``None`` for the inherited ones.
        outputs: descriptors that replace stdout and stderr, by their numbers.
        failure: the descriptor of the file for a packed :class:`RemoteException`; when it is there, its time is sent through ``pipe``.
        end: the descriptor of the file for a packed :class:`End`; once that is written, a 0 is sent.
        pipe: that of a pipe to the caller.
        parent: the caller's process.
    """

    load: Callable[[torch.device], tuple[Callable[[], Any], SyncedObjects]]
    world: World
    backend: str | None
    timeout: timedelta | None
    environ: Mapping[str, str]
    threads: int | None
    streams: dict[str, Any] | None
    outputs: Mapping[int, int]
    failure: int
    end: int
    pipe: int
    parent: int


@dataclass(frozen=True)
class End:
    """How a rank ended.

    Attributes:
        value: the result, on rank 0.
        changes: changes of the caller's objects: on rank 0, and on all ranks that ended early.
        leaves: whether it ended with ``sys.exit()``.
    """

    value: Any = None
    changes: dict[str, list] | None = None
    leaves: bool = False


class _Stopped(BaseException):
    """Raised in a rank's function to end it, because another rank has failed."""


_job: Job | None = None
_callers = SyncedObjects(())
_reported = False


def run(job: Job) -> None:
    """Run ``job`` in this process, which was started for it."""
    global _job
    with suppress(PermissionError):
        os.setpgid(0, 0)  # its children are ended with it, and the caller forwards Ctrl-C to it
    die_with_parent(job.parent)
    signal.set_wakeup_fd(-1)  # an event loop of the caller's must not receive this rank's signals
    signal.signal(signal.SIGTERM, _stop)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if job.threads is not None:
        torch.set_num_threads(job.threads)
    os.environ.update(job.environ)
    redirect_output(job.outputs)
    refuse_stdin("ask before the launch, and pass the answer as an argument")
    show_in_notebook(job.world.rank)
    if job.streams is not None:
        set_state(job.streams)
    _job = job
    end = _run(job)
    try:
        _pack(end, job.end)
    except Exception as error:
        failed(
            UsageError(
                f"the result of rank {job.world.rank}, or a value that the function stored in one of the caller's models, cannot be sent "
                f"to the caller: {error}. Use tensors, models, numbers and containers of them, and define their classes outside of the "
                "function."
            )
        )
        os.ftruncate(job.end, 0)
        _pack(End(), job.end)
    _send(job, 0.0)


def _run(job: Job) -> End:
    global _callers
    value, leaves, finished = None, False, False
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        with groups.opened(job.world, job.backend, job.timeout) as group:
            try:
                function, _callers = job.load(group.device if group else torch.device("cpu"))
                value = function()
            except BaseException as error:
                failed(error)
                raise
        finished = True
    except SystemExit as error:
        leaves = finished = not error.code
    except BaseException as error:
        _take_no_notice()
        failed(error)
    _take_no_notice()
    changes = _callers.changes(value) if job.world.rank == 0 or not finished else None
    return End(value if job.world.rank == 0 else None, changes, leaves)


def failed(error: BaseException) -> None:
    """In a launched rank, report the exception to the caller before the surrounding contexts are left.

    When this rank leaves the process group, other ranks may fail, but their errors come later.
    """
    global _reported
    job = _job
    if job is None or _reported or isinstance(error, _Stopped) or (isinstance(error, SystemExit) and not error.code):
        return
    _reported = True
    when = time.monotonic()
    _pack(RemoteException.of(error, _users(error.__traceback__), _callers.can_pack), job.failure)
    _send(job, when)


def _take_no_notice() -> None:
    """Report that this rank has finished, whatever other ranks do."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)


def _pack(thing: Any, descriptor: int) -> None:
    with open(descriptor, "w+b", closefd=False) as file:
        file.seek(0)
        _callers.pack(thing, file)


def _send(job: Job, when: float) -> None:
    os.write(job.pipe, MESSAGE.pack(when))


def _users(traceback: TracebackType | None) -> TracebackType | None:
    """``traceback`` from the user's first line on, if it has one."""
    inner = traceback
    while inner is not None and is_ours(inner.tb_frame):
        inner = inner.tb_next
    return inner or traceback


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise _Stopped
