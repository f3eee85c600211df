"""Runs a function on ranks that this process launches, watches and always ends.

``forking.py`` forks ranks, and ``spawning.py`` starts new interpreters. ``rank_process.py`` runs in a rank; ``returned_state.py`` packs
what it sends back, and ``child_output.py`` shows its output.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NoReturn, cast

from parwrap.errors import RankMismatchError
from parwrap.inline.child_output import ChildOutput
from parwrap.inline.forking import Forks, starting
from parwrap.inline.rank_process import MESSAGE, Job
from parwrap.inline.returned_state import SyncedObjects
from parwrap.inline.spawning import Spawns
from parwrap.system.processes import how_ended
from parwrap.system.shared_memory import private_file
from parwrap.world.world import World

__all__ = ["run_on_ranks"]

GRACE = 5.0
"""Seconds for ranks to end, once one has failed, Ctrl-C was pressed, or all have finished."""

MOMENT = 0.05
"""Seconds to wait for the news of a dead rank, after other ranks have raised errors because of it."""


def run_on_ranks(
    function: Callable[[], Any],
    size: int,
    timeout: timedelta | None = None,
    backend: str | None = "gloo",
    environ: Mapping[str, str] = MappingProxyType({}),
    start_method: str = "fork",
    who: str = "this",
) -> Any:
    """Call ``function`` on ``size`` ranks that this process launches, in a process group, and wait for all of them.

    Afterwards, the tensors, models, optimizers and schedulers of this process have the state of rank 0, as far as a rank survives to send
    it. With spawned ranks, this applies only to those that the function reaches. So do other objects that the function reaches. Ctrl-C is
    passed on to the ranks.

    Args:
        function: the function to call; it need not pickle.
        size: the number of ranks.
        timeout: how long a rank waits for another; by default torch's timeout.
        backend: the backend of the process group; ``None`` to choose by the device.
        environ: environment variables of the ranks.
        start_method: ``"fork"``, or ``"spawn"`` for new interpreters, which get ``function`` by cloudpickle.
        who: the name of the caller in errors.

    Returns:
        The function's result on rank 0.

    Raises:
        UsageError: the result, or ``function``, cannot be sent.
        RankMismatchError: a rank ended without a result.

    The exception of the first rank that fails is raised here too, with its traceback as the cause.

    >>> import torch
    >>> from parwrap.group import group as groups
    >>> run_on_ranks(lambda: torch.ones(2) * groups.world_size(), size=2)
    tensor([2., 2.])
    """
    with ExitStack() as opened:
        rendezvous = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="parwrap-")), "rendezvous").as_uri()
        files = [(opened.enter_context(private_file()), opened.enter_context(private_file())) for _ in range(size)]
        jobs = []
        for rank, (failure, end) in enumerate(files):
            world = World(rank, size, rank, size, launcher=start_method, init_method=rendezvous)
            job = partial(Job, world=world, backend=backend, timeout=timeout, parent=os.getpid())
            jobs.append(partial(job, failure=failure.fileno(), end=end.fileno()))
        starter: Forks | Spawns
        if start_method == "fork":
            starter = Forks(function, environ)
        else:
            starter = Spawns(function, environ, size, opened.enter_context(private_file()), who)
        with _started(starter, jobs) as ranks:
            interrupted = _watch(ranks)
        return _outcome(ranks, interrupted, starter.callers, files)


class _Rank:
    """The process of one rank.

    Attributes:
        failed_at: the time of its exception, or 0 if it ended without a report; otherwise ``None``.
        finished: whether it has reported its end.
        ended: whether its process has ended.
        how: how it ended, if without a report.
    """

    def __init__(self, starter: Forks | Spawns, job: Callable[..., Job]) -> None:
        self.failed_at: float | None = None
        self.finished = self.ended = self._terminated = False
        self.how = ""
        self._output = ChildOutput()
        self._messages, theirs = os.pipe()
        try:
            self.process = starter.start(job, self._output, theirs)
        except BaseException:
            os.close(self._messages)
            self._output.close()
            raise
        finally:
            os.close(theirs)
            self._output.started()
        self._pid = cast(int, self.process.pid)
        try:
            self.sentinel = os.pidfd_open(self._pid)
        except (AttributeError, OSError):  # an older system; multiprocessing's pipe stays open in processes that the rank has started
            self.sentinel = os.dup(self.process.sentinel)

    @property
    def sources(self) -> list[Any]:
        """The descriptors to wait for."""
        messages = [] if self.finished or self.failed_at is not None else [self._messages]
        return [self.sentinel, *messages, *self._output.sources]

    def receive(self) -> None:
        """Read its messages, and show its output."""
        if self.ended:
            return
        self._output.show()
        while wait([self._messages], 0) and (message := os.read(self._messages, MESSAGE.size)):
            (when,) = MESSAGE.unpack(message)
            if when:
                self.failed_at = when
            else:
                self.finished = True

    def end(self) -> None:
        """Handle the end of its process. If it did not report its end, kill it with its children."""
        if not self.ended:
            if not self.finished:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._pid, signal.SIGKILL)
                self.process.kill()
            self.process.join(GRACE)
            self.process.kill()
            self.process.join()
            self.receive()
            self.ended = True
            if not self.finished and self.failed_at is None and not self._terminated:
                self.how = _ending_of(self.process.exitcode)
                self.failed_at = 0.0
            try:
                self.process.close()
            except ValueError:  # something else has waited for it; it is assumed to be alive
                cast(Any, self.process)._popen.close()
            self._output.close()
            os.close(self._messages)
            os.close(self.sentinel)

    def signal(self, number: int) -> None:
        """Ask it to end. Ctrl-C also goes to its children, because a terminal's Ctrl-C does not reach them."""
        if not self.ended:
            self._terminated = True
            for send in (os.killpg, os.kill) if number == signal.SIGINT else (os.kill,):
                with suppress(ProcessLookupError):  # it may not lead a process group yet
                    send(self._pid, number)
                    break


def _ending_of(code: int | None) -> str:
    """How its process has ended."""
    if code is None:
        return (
            "ended, with an exit code that something else in this process collected, such as a SIGCHLD handler that waits for all children,"
        )
    return how_ended(code)


@contextmanager
def _started(starter: Forks | Spawns, jobs: Sequence[Callable[..., Job]]) -> Iterator[list[_Rank]]:
    """Start the ranks; none of them outlives the block."""
    ranks: list[_Rank] = []
    ignored = signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    try:
        if ignored:  # the system would then keep no exit codes
            with suppress(ValueError):  # in another thread
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with starting():
            for job in jobs:
                ranks.append(_Rank(starter, job))
        yield ranks
    finally:
        for rank in ranks:
            rank.end()
        if ignored:
            with suppress(ValueError):
                signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def _watch(ranks: Sequence[_Rank]) -> bool:
    """Wait until all ranks have ended, or their grace period is over. Returns whether Ctrl-C was pressed."""
    deadline, interrupted = None, False
    while waiting := [rank for rank in ranks if not rank.ended]:
        try:
            _wait(waiting, deadline)
            if deadline is not None:
                if time.monotonic() > deadline:
                    break
            elif any(rank.failed_at is not None for rank in ranks):
                _wait(waiting, time.monotonic() + MOMENT)
                deadline = time.monotonic() + GRACE
                for rank in ranks:
                    if rank.failed_at is None:
                        rank.signal(signal.SIGTERM)
            elif all(rank.finished for rank in ranks):
                deadline = time.monotonic() + GRACE
        except KeyboardInterrupt:
            if interrupted:
                raise
            interrupted, deadline = True, time.monotonic() + GRACE
            for rank in ranks:
                rank.signal(signal.SIGINT)
    return interrupted


def _wait(ranks: Sequence[_Rank], deadline: float | None) -> None:
    """Read the first messages from ``ranks`` before ``deadline``, if any."""
    sources = [source for rank in ranks for source in rank.sources]
    ready = wait(sources, None if deadline is None else max(0.0, deadline - time.monotonic()))
    ended = [rank for rank in ranks if rank.sentinel in ready]
    for rank in ranks:
        rank.receive()
    for rank in ended:
        rank.end()


def _outcome(ranks: Sequence[_Rank], interrupted: bool, callers: SyncedObjects, files: Sequence[tuple[BinaryIO, BinaryIO]]) -> Any:
    """Apply the changes of the caller's objects, and return rank 0's result or raise the first failure."""
    returned = [number for number, rank in enumerate(ranks) if rank.finished]
    ends = {number: _read(files[number][1], callers) for number in returned}
    changes = next((end.changes for end in ends.values() if end.changes is not None), None)
    if changes is not None:
        callers.take(changes)
    failed = [(rank.failed_at, number) for number, rank in enumerate(ranks) if rank.failed_at is not None]
    if failed:
        number = min(failed)[1]
        _raise(ranks[number], f"rank {number} of {len(ranks)}", files[number][0], callers)
    if interrupted and len(returned) < len(ranks):
        raise KeyboardInterrupt
    if ends[0].leaves:
        raise SystemExit
    return ends[0].value


def _raise(rank: _Rank, who: str, failure: BinaryIO, callers: SyncedObjects) -> NoReturn:
    if rank.how:
        raise RankMismatchError(f"{who} {rank.how}{' (out of memory?)' if 'SIGKILL' in rank.how else ''} before it finished.")
    raise _read(failure, callers).error(who)


def _read(file: BinaryIO, callers: SyncedObjects) -> Any:
    file.seek(0)
    return callers.unpack(file)
