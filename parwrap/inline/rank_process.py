"""The code that runs in the process of a started rank. ``launching.py`` starts and watches this process.

A forked rank has everything that the caller has, so nothing is sent to it. It computes with one thread, because OpenMP does not work after
a fork in a process that has used several threads.
"""

from __future__ import annotations

import os
import signal
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

import torch

from parwrap.errors import UsageError
from parwrap.inline.notebook import redirect_output, show_in_notebook
from parwrap.inline.remote_exception import RemoteException
from parwrap.inline.returned import CallersObjects, contents, differing
from parwrap.places import is_ours
from parwrap.ranks.group import is_failure
from parwrap.ranks.processes import die_with_parent, forks_end_here
from parwrap.ranks.stdin import refuse_stdin

__all__ = ["ENDING", "MESSAGE", "End", "Job", "Task", "end_file", "failure_file", "forks_of_started_rank_end_here", "report_failure", "run"]

MESSAGE = struct.Struct("d")
"""The format of a message to the caller: the time of a failure, or 0 at the end."""

ENDING = (signal.SIGINT, signal.SIGTERM)
"""Signals that end a rank: Ctrl-C, and another rank's failure. They are blocked when the rank starts."""


@dataclass(frozen=True)
class Task:
    """What a rank runs, with the caller's objects.

    Attributes:
        function: the function to call.
        objects: the caller's objects that the function reaches and whose state is sent back.
        names: a function that returns the values that ``function`` reaches, by name.
        inherited: the caller's open files and loaders, which forked ranks cannot all use.
    """

    function: Callable[[], Any]
    objects: list[Any]
    names: Callable[[], Mapping[str, Any]]
    inherited: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Job:
    """What a rank needs to know.

    Attributes:
        rank: the number of the rank.
        task: a function that returns the task, called after the environment variables are set.
        variables: environment variables to set first.
        threads: the number of compute threads; ``None`` for the number that environment variables set.
        outputs: descriptors that replace stdout and stderr, by the numbers of these, 1 and 2.
        folder: the folder for :func:`failure_file` and :func:`end_file`.
        pipe: the descriptor of a pipe to the caller. A message there says that this rank has failed or ended.
        parent: the id of the caller's process.
    """

    rank: int
    task: Callable[[], Task]
    variables: Mapping[str, str]
    threads: int | None
    outputs: Mapping[int, int]
    folder: Path
    pipe: int
    parent: int


def failure_file(folder: Path, rank: int) -> Path:
    """The file for the packed :class:`RemoteException` of ``rank``."""
    return folder / f"failure-{rank}"


def end_file(folder: Path) -> Path:
    """The file for the packed :class:`End` of rank 0."""
    return folder / "end"


@dataclass(frozen=True)
class End:
    """How rank 0 ended.

    Attributes:
        value: the result of the function; ``None`` if it raised an exception.
        state: the new state of the caller's objects.
        changed: the names of other values that the function has changed.
    """

    value: Any
    state: dict[str, list[Any]]
    changed: list[str]


class _Stopped(BaseException):
    """Raised in a rank's function to end it, because another rank has failed."""


class _Reports:
    """Sends the first failure of this rank to the caller."""

    def __init__(self, job: Job) -> None:
        self.job, self.failed = job, False
        self.callers = CallersObjects()
        # opened now, because inside the scope only rank 0 may open files
        self._file = open(failure_file(job.folder, job.rank), "wb", buffering=0)  # noqa: SIM115

    def failure(self, error: BaseException) -> None:
        """Send the caller ``error``, unless one was sent before or another rank's failure has caused it."""
        if self.failed or isinstance(error, _Stopped):
            return
        self.failed = True
        when = time.monotonic()
        packed = BytesIO()
        self.callers.pack(RemoteException.of(error, _script_part(error.__traceback__)), packed)
        self._file.write(packed.getbuffer())
        self.send(when)

    def send(self, when: float) -> None:
        """Tell the caller the time of a failure, or with 0 that this rank has ended."""
        os.write(self.job.pipe, MESSAGE.pack(when))


_reports: _Reports | None = None
"""The reports of this process if it is a started rank, else ``None``."""


def report_failure(error: BaseException) -> None:
    """In a started rank, report the exception to the caller before the scope closes.

    When this rank leaves the process group, other ranks may fail too. So this error is reported first, and the caller raises it.
    """
    if _reports is not None and is_failure(error):
        _reports.failure(error)


def forks_of_started_rank_end_here() -> AbstractContextManager[None]:
    """In a started rank, a process that the block forks ends when it leaves the block, because only the rank runs what follows."""
    return nullcontext() if _reports is None else forks_end_here()


def run(job: Job) -> None:
    """Run ``job`` in this process, which was started for it."""
    global _reports
    with suppress(PermissionError):
        os.setpgid(0, 0)  # its children are ended with it, and the caller forwards Ctrl-C to it
    die_with_parent(job.parent)
    signal.set_wakeup_fd(-1)  # an event loop of the caller's must not receive this rank's signals
    signal.signal(signal.SIGTERM, _stop)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if job.threads is not None:
        torch.set_num_threads(job.threads)
    os.environ.update(job.variables)
    redirect_output(job.outputs)
    refuse_stdin("ask before the call, and pass the answer as an argument")
    show_in_notebook(job.rank)
    _reports = _Reports(job)
    end = _run(job, _reports)
    if job.rank == 0:
        _pack(end, _reports)
    _reports.send(0.0)


def _run(job: Job, reports: _Reports) -> End:
    value, state, changed = None, {}, []
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        task = job.task()
        reports.callers = callers = CallersObjects(task.objects)
        before = callers.now(), contents(task.names(), callers)
        try:
            value = task.function()
        finally:
            _ignore_signals()
            if job.rank == 0:
                state, changed = callers.state(before[0]), differing(before[1], contents(task.names(), callers))
    except BaseException as error:
        _ignore_signals()
        reports.failure(error)
    return End(value, state, changed)


def _pack(end: End, reports: _Reports) -> None:
    """Write ``end`` for the caller. If the result cannot be sent, write at least the new state of the caller's objects."""
    errors: list[Exception] = []
    for sent in (end, replace(end, value=None), replace(end, value=None, state={})):
        try:
            reports.callers.pack(sent, end_file(reports.job.folder))
            break
        except Exception as error:
            errors.append(error)
    if errors:
        what = "the result of rank 0" if len(errors) == 1 else "a value that the function stored in one of the caller's objects"
        where = "Return" if len(errors) == 1 else "Store"
        reports.failure(
            UsageError(
                f"{what} cannot be sent to the caller: {errors[-1]}. {where} tensors, models, numbers and containers of them, and define "
                "their classes outside of the function."
            )
        )


def _ignore_signals() -> None:
    """Ignore the signals that end a rank, so that this rank finishes even if another rank fails."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)


def _script_part(traceback: TracebackType | None) -> TracebackType | None:
    """``traceback`` from the script's first line on, if it has one."""
    inner = traceback
    while inner is not None and is_ours(inner.tb_frame.f_code.co_filename):
        inner = inner.tb_next
    return inner or traceback


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise _Stopped
