"""Starts the rank processes of one test from a fork server that has imported torch, watches them, and reliably ends them.

``rank_process.py`` runs in a rank, ``plugin.py`` reports to pytest.
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
"""Seconds for the other ranks to end after one has failed, and for all of them after all have passed."""

PRELOADED = [
    *("numpy", "torch", "torch.distributed", "torch.utils.serialization", DYNAMO),
    *("pytest", *sorted(f"_pytest.{name}" for name in builtin_plugins)),
    *("parwrap.group.collectives", "parwrap.api.distributed", "parwrap.strategies.ddp.ddp", "parwrap.testing.preloaded"),
]
"""Modules that the fork server imports once for all ranks; ``torch._dynamo``, which a process's first optimizer imports, takes a second."""


@dataclass(frozen=True, eq=False)
class Rank:
    """The started process of one rank.

    Attributes:
        task: the task that it runs.
        process: the :class:`multiprocessing.Process`.
        connection: the connection for its :class:`Report`; closing it lets a rank that has passed leave.
    """

    task: Task
    process: Any
    connection: Connection

    def receive(self) -> Report | None:
        """The report, or ``None`` from a process that has ended without one."""
        with suppress(EOFError, OSError):
            if self.connection.poll():
                return cast(Report, self.connection.recv())
        return None

    def stacks(self) -> str:
        """The Python stacks that the process and its forks have dumped, each down to the call of the test."""
        ours = ("_end_with_pytest", "Extension modules:")
        dumped = [self.task.stacks.read_text(errors="replace")]
        for child in self.forked():
            file = self.task.stacks_of(child)
            stacks = file.read_text(errors="replace") if file.exists() else "is still being written; its stack is among those above"
            dumped.append(f"In a process that it forked ({_state_of(child)}):\n{stacks}")
        threads = "\n\n".join(dumped).split("\n\n")
        return "\n\n".join(_above_call(thread) for thread in threads if not any(text in thread for text in ours))

    def forked(self) -> list[int]:
        """The pids of forked processes: those that have a file for their stacks, and those that do not have one yet."""
        written = [int(file.name.rpartition("-")[2]) for file in self.task.folder.glob(self.task.stacks_of("*").name)]
        listed: list[str] = []
        for children in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            with suppress(OSError):  # that thread has ended
                listed += children.read_text().split()
        return sorted({*written, *map(int, listed)})


def rank_environ() -> dict[str, str]:
    """The environment of the ranks: this process's own, without the variables of a launcher that may have started it."""
    environ = {name: value for name, value in os.environ.items() if name not in launch_variables()}
    environ.setdefault("OMP_NUM_THREADS", "1")
    if "lo" in [name for _, name in socket.if_nameindex()]:
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # so that nothing listens beyond this machine
    return environ


def start_fork_server(preload: Sequence[str] = (), pytest_options: Sequence[str] = ()) -> None:
    """Start multiprocessing's fork server unless it runs already; its imports continue after this function returns.

    Args:
        preload: the names of modules to import besides ``PRELOADED``.
        pytest_options: pytest's options in the ranks.
    """
    with _default_start_method_kept(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", rank_environ()["OMP_NUM_THREADS"])  # torch reads it on import, in the fork server
        patch.setenv(PYTEST_OPTIONS, json.dumps(pytest_options))
        forkserver.set_forkserver_preload([*preload, *PRELOADED])
        forkserver.ensure_running()


@contextmanager
def launched(tasks: Iterable[Task]) -> Iterator[list[Rank]]:
    """Yield the ranks that run ``tasks``. After the block they have ``GRACE`` seconds to end; if it raises, they are killed at once."""
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
    """Restore multiprocessing's default start method after the block: starting a process fixes it, but only the user may set it, once."""
    method = multiprocessing.get_start_method(allow_none=True)
    yield
    multiprocessing.set_start_method(method, force=True)


def _end(rank: Rank) -> None:
    """Kill the process if it still runs, with everything that it has started."""
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
        ranks: the ranks to wait for.
        timeout: how long to wait, in seconds; once a rank has failed to pass, at most ``GRACE``.
    """
    deadline = time.monotonic() + timeout
    reports: dict[Rank, Report] = {}
    while waiting := [rank for rank in ranks if rank not in reports]:
        sources = {source: rank for rank in waiting for source in (rank.connection, rank.process.sentinel)}
        ready = wait(sources, max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        # other ranks notice a death before pytest does, so it precedes all reports that are still missing
        death = max((report.time for report in reports.values()), default=0.0)
        for rank in {sources[source] for source in ready}:
            reports[rank] = rank.receive() or _dead(rank, death)
        if any(report.outcome != "passed" for report in reports.values()):
            deadline = min(deadline, time.monotonic() + GRACE)
    return sorted(reports.values(), key=lambda report: report.time)


def _dead(rank: Rank, when: float) -> Report:
    rank.process.join(GRACE)
    rank.process.kill()  # only matters if it has closed its connection and lives on
    rank.process.join()
    return Report(rank.task.rank, "died", when, f"{how_ended(rank.process.exitcode)} before the test finished", rank.stacks())


def dump_stacks(ranks: list[Rank]) -> None:
    """Make each of ``ranks`` write its Python stacks, for :meth:`Rank.stacks`; a rank that is still starting ends without writing them."""
    for rank in ranks:
        os.kill(rank.process.pid, signal.SIGQUIT)
        for child in rank.forked():
            with suppress(ProcessLookupError):
                if os.getpgid(child) == rank.process.pid:  # its pid may belong to another process by now
                    os.kill(child, signal.SIGQUIT)
    until = time.monotonic() + GRACE
    while time.monotonic() < until and any(rank.process.is_alive() and not rank.task.stacks.stat().st_size for rank in ranks):
        time.sleep(0.05)
    time.sleep(0.1)  # a dump is written line by line


def _above_call(thread: str) -> str:
    """The stack of a ``thread``, the innermost call first, down to the call of the test."""
    above, _, rest = thread.rpartition(f'  File "{rank_process.__file__}"')
    return (above or rest).rstrip()


def _state_of(process: int) -> str:
    """The state of a ``process`` as Linux shows it: where in the kernel it is, and which signals it blocks and catches."""
    try:
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines() if ":\t" in line)
        place = Path(f"/proc/{process}/wchan").read_text()
    except OSError:
        return f"pid {process}, which has ended"
    return f"pid {process}, {status['State']} in {place}, blocks signals {status['SigBlk']} and catches {status['SigCgt']}"
