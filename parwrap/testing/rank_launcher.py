"""The processes of the ranks of one test: started from a fork server that has imported torch, watched, and ended for sure.

What a rank does is ``rank_process.py``'s, what pytest is told of it ``plugin.py``'s.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

import pytest
from _pytest.config import builtin_plugins

from parwrap.system.processes import how_ended
from parwrap.testing import rank_process
from parwrap.testing.preloaded import PYTEST_OPTIONS
from parwrap.testing.rank_process import Report, Task
from parwrap.torch_private.dynamo import DYNAMO
from parwrap.world.world import launch_variables

__all__ = ["GRACE", "Rank", "collect", "dump_stacks", "launched", "rank_environ", "start_fork_server"]

GRACE = 2.0
"""Seconds that the other ranks have to end by themselves after one has failed, and all of them after all have passed."""

PRELOADED = [
    *("numpy", "torch", "torch.distributed", "torch.utils.serialization", DYNAMO),
    *("pytest", *sorted(f"_pytest.{name}" for name in builtin_plugins)),
    *("parwrap.group.collectives", "parwrap.api.distributed", "parwrap.strategies.ddp.ddp", "parwrap.testing.preloaded"),
]
"""What the fork server imports once for all ranks; ``torch._dynamo`` is what a process's first optimizer imports, in a second."""


@dataclass(frozen=True, eq=False)
class Rank:
    """The started process of one rank.

    Attributes:
        task: what it runs.
        process: the :class:`multiprocessing.Process`.
        connection: on which its :class:`Report` comes; closing it lets a rank that has passed leave.
    """

    task: Task
    process: Any
    connection: Connection

    def receive(self) -> Report | None:
        """The report that has come, or ``None`` from a process that has ended without one."""
        with suppress(EOFError, OSError):
            if self.connection.poll():
                return cast(Report, self.connection.recv())
        return None

    def stacks(self) -> str:
        """The Python stacks that the process has dumped, and those that it has forked, each down to where the test is called."""
        ours = ("_end_with_pytest", "Extension modules:")
        dumped = [self.task.stacks.read_text(errors="replace")]
        for child in self.forked():
            file = self.task.stacks_of(child)
            stacks = file.read_text(errors="replace") if file.exists() else "is on its way still; its stack is among those above"
            dumped.append(f"In a process that it has forked ({_state_of(child)}):\n{stacks}")
        threads = "\n\n".join(dumped).split("\n\n")
        return "\n\n".join(_above_call(thread) for thread in threads if not any(text in thread for text in ours))

    def forked(self) -> list[int]:
        """The processes that it has forked: those that write their stacks to a file, and those that have not come to it."""
        written = [int(file.name.rpartition("-")[2]) for file in self.task.folder.glob(self.task.stacks_of("*").name)]
        listed: list[str] = []
        for children in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            with suppress(OSError):  # that thread has ended
                listed += children.read_text().split()
        return sorted({*written, *map(int, listed)})


def rank_environ() -> dict[str, str]:
    """The environment of the ranks: this process's own, less the variables of a launcher that may have started it."""
    environ = {name: value for name, value in os.environ.items() if name not in launch_variables()}
    environ.setdefault("OMP_NUM_THREADS", "1")
    if "lo" in [name for _, name in socket.if_nameindex()]:
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # so that nothing listens beyond this machine
    return environ


def start_fork_server(preload: Sequence[str] = (), pytest_options: Sequence[str] = ()) -> None:
    """Start multiprocessing's fork server unless it runs; its imports go on after the return.

    Args:
        preload: names of modules that it imports beside its own.
        pytest_options: those of the ranks.
    """
    with _default_start_method_kept(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", rank_environ()["OMP_NUM_THREADS"])  # torch reads it when it is imported, so not in a rank
        patch.setenv(PYTEST_OPTIONS, json.dumps(pytest_options))
        forkserver.set_forkserver_preload([*preload, *PRELOADED])
        forkserver.ensure_running()


@contextmanager
def launched(tasks: Iterable[Task]) -> Iterator[list[Rank]]:
    """The ranks that run ``tasks``. They may leave in their own time when the block ends, and are killed when it raises."""
    start_fork_server()
    ranks: list[Rank] = []
    try:
        for task in tasks:
            ranks.append(_start(task))
        yield ranks
        for rank in ranks:
            rank.connection.close()
        until = time.monotonic() + GRACE
        for rank in ranks:
            rank.process.join(max(0.0, until - time.monotonic()))
    finally:
        for rank in ranks:
            _end(rank)


def _start(task: Task) -> Rank:
    task.stacks.touch()
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    with theirs:
        process = context.Process(target=rank_process.run, args=(task, theirs), name=f"rank {task.rank}")
        with _default_start_method_kept():
            process.start()
    return Rank(task, process, ours)


@contextmanager
def _default_start_method_kept() -> Iterator[None]:
    """Starting a process settles multiprocessing's default, also where another method is named; it is the user's to set, once."""
    method = multiprocessing.get_start_method(allow_none=True)
    yield
    multiprocessing.set_start_method(method, force=True)


def _end(rank: Rank) -> None:
    """Kill the process if it still runs, with all that it has started."""
    if rank.process.is_alive():
        with suppress(ProcessLookupError):
            os.killpg(rank.process.pid, signal.SIGKILL)
        rank.process.kill()
    rank.process.join()
    rank.process.close()
    rank.connection.close()


def collect(ranks: list[Rank], timeout: float) -> list[Report]:
    """The reports in the order in which the ranks ended; those of stuck ranks are missing.

    Args:
        ranks: what to wait for.
        timeout: for how long, in seconds; once a rank has not passed, for ``GRACE`` at most.
    """
    deadline = time.monotonic() + timeout
    reports: dict[Rank, Report] = {}
    while waiting := [rank for rank in ranks if rank not in reports]:
        sources = {source: rank for rank in waiting for source in (rank.connection, rank.process.sentinel)}
        ready = wait(sources, max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        # the others notice a death before pytest does, so it comes before every report that is not here yet
        death = max((report.time for report in reports.values()), default=0.0)
        for rank in {sources[source] for source in ready}:
            reports[rank] = rank.receive() or _dead(rank, death)
        if any(report.outcome != "passed" for report in reports.values()):
            deadline = min(deadline, time.monotonic() + GRACE)
    return sorted(reports.values(), key=lambda report: report.time)


def _dead(rank: Rank, when: float) -> Report:
    rank.process.join(GRACE)
    rank.process.kill()  # does something only if it has closed its connection and lives on
    rank.process.join()
    return Report(rank.task.rank, "died", when, f"{how_ended(rank.process.exitcode)} before the test was over", rank.stacks())


def dump_stacks(ranks: list[Rank]) -> None:
    """Make each of ``ranks`` write its Python stacks, for :meth:`Rank.stacks`; one that is still starting ends without."""
    for rank in ranks:
        os.kill(rank.process.pid, signal.SIGQUIT)
        for child in rank.forked():
            with suppress(ProcessLookupError):
                if os.getpgid(child) == rank.process.pid:  # else another's by now
                    os.kill(child, signal.SIGQUIT)
    until = time.monotonic() + GRACE
    while time.monotonic() < until and any(rank.process.is_alive() and not rank.task.stacks.stat().st_size for rank in ranks):
        time.sleep(0.05)
    time.sleep(0.1)  # a dump is written line by line


def _above_call(thread: str) -> str:
    """The stack of a ``thread``, the innermost call first, down to where the test is called."""
    above, _, rest = thread.rpartition(f'  File "{rank_process.__file__}"')
    return (above or rest).rstrip()


def _state_of(process: int) -> str:
    """What Linux tells of a process, for one that shows no stack: where in the kernel it is, and the signals that do not reach it."""
    try:
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines() if ":\t" in line)
        place = Path(f"/proc/{process}/wchan").read_text()
    except OSError:
        return f"pid {process}, which has ended"
    return f"pid {process}, {status['State']} in {place}, blocks signals {status['SigBlk']} and catches {status['SigCgt']}"
