"""A function on ranks that are forked from this process: started, watched, and ended for sure.

What a rank does is ``forked_rank.py``'s; what it sends back is packed by ``returned.py``.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NoReturn, cast

import torch

from parwrap import group as groups
from parwrap.errors import RankMismatchError, UsageError
from parwrap.forked_rank import ENDING, Job, run
from parwrap.memory import private_file
from parwrap.returned import CallersObjects
from parwrap.world import World, read_world

__all__ = ["refuse_unforkable", "run_forked"]

GRACE = 5.0
"""Seconds that ranks have to end by themselves, once one has failed, Ctrl-C was pressed, or all are through."""

MOMENT = 0.05
"""Seconds in which a rank that has died is noticed after what others have raised because of that."""


def refuse_unforkable(who: str) -> None:
    """Raise :class:`UsageError` where ``who`` cannot fork ranks."""
    if not hasattr(os, "fork"):
        problem = "this system cannot do that: start ranks with `python -m parwrap.run`"
    elif groups.open_group() is not None or read_world(os.environ).size > 1:
        problem = f"this is rank {groups.rank()} of {groups.world_size()} already: call it in a process that was not launched as a rank"
    elif multiprocessing.current_process().daemon:
        problem = "this is a daemonic process of multiprocessing, which may start none: call it in the main process"
    elif gc.get_freeze_count():
        problem = "gc.freeze() hides objects that are to come back: call gc.unfreeze() before"
    elif torch.cuda.is_initialized():
        problem = "CUDA has started here, which does not survive that: call it before anything is on a GPU"
    else:
        return
    raise UsageError(f"{who} forks ranks from this process, and {problem}.")


def run_forked(
    function: Callable[[], Any],
    size: int,
    timeout: timedelta | None = None,
    backend: str = "gloo",
    environ: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """Call ``function`` on ``size`` ranks that are forked from this process, in a process group, and wait for all of them.

    The tensors, models, optimizers and schedulers of this process have become what they are on rank 0 when this returns, and when it
    raises, as far as a rank lives to tell. Ctrl-C is passed on to the ranks.

    Args:
        function: what to call; it need not pickle.
        size: the number of ranks.
        timeout: for how long a rank waits for another; by default torch's.
        backend: of the process group.
        environ: environment variables of the ranks.

    Returns:
        What it has returned on rank 0.

    Raises:
        UsageError: that cannot be sent.
        RankMismatchError: a rank has ended without a word.

    What the first rank that fails has raised, this raises too, with its traceback as the cause.

    >>> run_forked(lambda: torch.ones(2) * groups.world_size(), size=2)
    tensor([2., 2.])
    """
    callers = CallersObjects()
    with ExitStack() as opened:
        meeting = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="parwrap-")), "meeting").as_uri()
        files = [(opened.enter_context(private_file()), opened.enter_context(private_file())) for _ in range(size)]

        def job(rank: int, word: Connection) -> Job:
            world = World(rank, size, rank, size, launcher="fork", init_method=meeting)
            return Job(function, world, backend, timeout, environ, callers, *files[rank], word, os.getpid())

        with _started(size, job) as ranks:
            interrupted = _watch(ranks)
        return _outcome(ranks, interrupted, callers, files)


class _Rank:
    """The process of one rank.

    Attributes:
        failed_at: when it has raised something, or 0 if it has ended without a word; ``None`` if neither.
        through: whether it has said how it ended.
        gone: whether its process has ended.
        how: it has ended, if without a word.
    """

    def __init__(self, job: Callable[[Connection], Job], name: str) -> None:
        self._words, theirs = multiprocessing.Pipe(duplex=False)
        self.process = multiprocessing.get_context("fork").Process(target=run, args=(job(theirs),), name=name)
        self.failed_at: float | None = None
        self.through = self.gone = self._told_to_end = False
        self.how = ""
        with theirs:
            self.process.start()
        self._pid = cast(int, self.process.pid)
        # that of multiprocessing lives on in what the rank itself has started
        self.sentinel = os.pidfd_open(self._pid) if hasattr(os, "pidfd_open") else os.dup(self.process.sentinel)

    @property
    def sources(self) -> list[Any]:
        """What to wait for."""
        return [self.sentinel] if self.through or self.failed_at is not None else [self.sentinel, self._words]

    def receive(self) -> None:
        """Take in its words."""
        with suppress(EOFError, OSError):
            while self._words.poll():
                when = self._words.recv()
                if when:
                    self.failed_at = when
                else:
                    self.through = True

    def end(self) -> None:
        """Its process has ended, or is killed, with all that it has started, if it did not say how it ended."""
        if not self.gone:
            if not self.through:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._pid, signal.SIGKILL)
                self.process.kill()
            self.process.join(GRACE)
            self.process.kill()
            self.process.join()
            self.receive()
            code, self.gone = cast(int, self.process.exitcode), True
            if not self.through and self.failed_at is None and not self._told_to_end:
                self.how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                self.failed_at = 0.0
            self.process.close()
            self._words.close()
            os.close(self.sentinel)

    def signal(self, number: int) -> None:
        """Have it end by itself."""
        if not self.gone:
            self._told_to_end = True
            os.kill(self._pid, number)  # at least a zombie


@contextmanager
def _started(size: int, job: Callable[[int, Connection], Job]) -> Iterator[list[_Rank]]:
    """The ranks, none of which lives on after the block."""
    ranks: list[_Rank] = []
    try:
        with _signals_held(), warnings.catch_warnings():
            # Python's, of threads that the ranks do not have; those of torch are dealt with
            warnings.filterwarnings("ignore", message=".*use of fork", category=DeprecationWarning)
            for number in range(size):
                ranks.append(_Rank(lambda word, number=number: job(number, word), name=f"rank {number}"))  # type: ignore[misc]
        yield ranks
    finally:
        for rank in ranks:
            rank.end()


@contextmanager
def _signals_held() -> Iterator[None]:
    """Those that end a rank come when it is ready for them, and Ctrl-C when all are started."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _watch(ranks: Sequence[_Rank]) -> bool:
    """Wait until all have ended, or the grace of those that are late is over; returns whether Ctrl-C was pressed."""
    deadline, interrupted = None, False
    while waiting := [rank for rank in ranks if not rank.gone]:
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
            elif all(rank.through for rank in ranks):
                deadline = time.monotonic() + GRACE
        except KeyboardInterrupt:
            if interrupted:
                raise
            interrupted, deadline = True, time.monotonic() + GRACE
            for rank in ranks:
                rank.signal(signal.SIGINT)
    return interrupted


def _wait(ranks: Sequence[_Rank], deadline: float | None) -> None:
    """Take in what comes first from ``ranks``, if anything does before ``deadline``."""
    sources = [source for rank in ranks for source in rank.sources]
    ready = wait(sources, None if deadline is None else max(0.0, deadline - time.monotonic()))
    ended = [rank for rank in ranks if rank.sentinel in ready]
    for rank in ranks:
        rank.receive()
    for rank in ended:
        rank.end()


def _outcome(ranks: Sequence[_Rank], interrupted: bool, callers: CallersObjects, files: Sequence[tuple[BinaryIO, BinaryIO]]) -> Any:
    """Return or raise what rank 0 has returned, or the first rank that has failed has raised, with the caller's objects changed."""
    told = [number for number, rank in enumerate(ranks) if rank.through]
    ends = {number: _read(files[number][1], callers) for number in told}
    changes = next((end.changes for end in ends.values() if end.changes is not None), None)
    if changes is not None:
        callers.take(changes)
    failed = [(rank.failed_at, number) for number, rank in enumerate(ranks) if rank.failed_at is not None]
    if failed:
        number = min(failed)[1]
        _raise(ranks[number], f"rank {number} of {len(ranks)}", files[number][0], callers)
    if interrupted and len(told) < len(ranks):
        raise KeyboardInterrupt
    if ends[0].leaves:
        raise SystemExit
    return ends[0].value


def _raise(rank: _Rank, who: str, failure: BinaryIO, callers: CallersObjects) -> NoReturn:
    if rank.how:
        raise RankMismatchError(f"{who} {rank.how}{' (out of memory?)' if 'SIGKILL' in rank.how else ''} before it was through.")
    raise _read(failure, callers).error(who)


def _read(file: BinaryIO, callers: CallersObjects) -> Any:
    file.seek(0)
    return callers.unpack(file)
