"""Starts pools of rank processes, on Linux from a fork server with torch, keeps them for the next test, and reliably ends them.

``rank_process.py`` runs in a rank, ``plugin.py`` reports to pytest.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

import pytest
from _pytest.config import builtin_plugins

from parwrap.ranks.platform import FORKS, kill_group
from parwrap.ranks.processes import how_ended
from parwrap.ranks.world import launch_variables
from parwrap.testing import rank_process
from parwrap.testing.preloaded import PRELOAD
from parwrap.testing.rank_process import RankSetup, Report, Task
from parwrap.torch_private.dynamo import DYNAMO

__all__ = ["GRACE", "Pool", "Pools", "Rank", "collect", "dump_stacks", "rank_environ", "start_fork_server"]

GRACE = 2.0
"""Seconds for the other ranks to end after one has failed, and for all of them after all have passed."""

MOST_IDLE = 2
"""At most this many pools wait for another test, because ranks take memory."""

PRELOADED = [
    *("numpy", "torch", "torch.distributed", "torch.utils.serialization", DYNAMO),
    *("pytest", *sorted(f"_pytest.{name}" for name in builtin_plugins)),
    *("parwrap.ranks.collectives", "parwrap.decorators.distributed", "parwrap.testing.process_state"),
]
"""Modules that the fork server imports once for all ranks; ``torch._dynamo``, which a process's first optimizer imports, takes a second."""


@dataclass(frozen=True, eq=False)
class Rank:
    """The started process of one rank.

    Attributes:
        setup: its number, folder and options.
        process: the :class:`multiprocessing.Process`.
        connection: takes a :class:`Task` there and a :class:`Report` back; closing it lets the rank leave.
    """

    setup: RankSetup
    process: Any
    connection: Connection

    def receive(self) -> Report | None:
        """The report that the process has sent; ``None`` if it has sent none."""
        with suppress(EOFError, OSError):
            if self.connection.poll():
                return cast(Report, self.connection.recv())
        return None

    def stacks(self) -> str:
        """The Python stacks that the process and its forks have dumped, each down to the call of the test."""
        ours = ("_end_with_pytest", "Extension modules:")
        dumped = [self.setup.stacks.read_text(errors="replace")]
        for child in self.forked():
            file = self.setup.stacks_of(child)
            stacks = file.read_text(errors="replace") if file.exists() else "is still being written; its stack is among those above"
            dumped.append(f"In a process that it forked ({_state_of(child)}):\n{stacks}")
        threads = "\n\n".join(dumped).split("\n\n")
        return "\n\n".join(_above_call(thread) for thread in threads if not any(text in thread for text in ours))

    def forked(self) -> list[int]:
        """The pids of forked processes: those that have a file for their stacks, and those that do not have one yet."""
        written = [int(file.name.rpartition("-")[2]) for file in self.setup.folder.glob(self.setup.stacks_of("*").name)]
        listed: list[str] = []
        for children in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            with suppress(OSError):  # that thread has ended
                listed += children.read_text().split()
        return sorted({*written, *map(int, listed)})


def rank_environ() -> dict[str, str]:
    """This process's environment without a launcher's variables, and by default with one thread and gloo on the loopback interface."""
    environ = {name: value for name, value in os.environ.items() if name not in launch_variables()}
    environ.setdefault("OMP_NUM_THREADS", "1")
    if "lo" in [name for _, name in socket.if_nameindex()]:
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # so that nothing listens beyond this machine
    return environ


def start_fork_server(preload: Sequence[str] = (), pytest_options: Sequence[str] = ()) -> None:
    """Start multiprocessing's fork server unless it runs already; its imports continue after this function returns.

    Where processes are not forked by default, do nothing: each rank imports what it needs.

    Args:
        preload: the names of modules to import besides ``PRELOADED``.
        pytest_options: pytest's options in the ranks.
    """
    if not FORKS:
        return
    with _default_start_method_kept(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", rank_environ()["OMP_NUM_THREADS"])  # torch reads it on import, in the fork server
        patch.setenv(PRELOAD, json.dumps([[*preload, *PRELOADED], pytest_options]))
        forkserver.set_forkserver_preload(["parwrap.testing.preloaded"])
        forkserver.ensure_running()


class Pool:
    """Ranks with an open process group, which run one test after another.

    Args:
        size: the number of ranks.
        pytest_options: pytest's options in the ranks.
        capture: whether the output of the ranks is kept for reports.
    """

    def __init__(self, size: int, pytest_options: tuple[str, ...], capture: bool) -> None:
        start_fork_server()
        self._folder = tempfile.TemporaryDirectory(prefix="parwrap-ranks-", ignore_cleanup_errors=True)
        self.ranks: list[Rank] = []
        try:
            for rank in range(size):
                setup = RankSetup(rank, size, Path(self._folder.name), pytest_options, rank_environ(), capture)
                self.ranks.append(_start(setup))
        except BaseException:
            self.kill()
            raise

    def run(self, task: Task, timeout: float) -> list[Report]:
        """Run ``task`` on all ranks; see :func:`collect`."""
        for rank in self.ranks:
            with suppress(BrokenPipeError):  # it has died, which its report will say
                rank.connection.send(task)
        return collect(self.ranks, timeout)

    def is_alive(self) -> bool:
        """Whether all processes still run."""
        return all(rank.process.is_alive() for rank in self.ranks)

    def close(self) -> None:
        """Let the ranks leave; those that have not done so within ``GRACE`` seconds are killed."""
        for rank in self.ranks:
            rank.connection.close()
        until = time.monotonic() + GRACE
        for rank in self.ranks:
            rank.process.join(max(0.0, until - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Kill the ranks that still run, and remove their folder."""
        for rank in self.ranks:
            _end(rank)
        self._folder.cleanup()


class Pools:
    """The pools that wait for the next test, one for each number of ranks.

    Args:
        pytest_options: pytest's options in the ranks.
        capture: whether the output of the ranks is kept for reports.
    """

    def __init__(self, pytest_options: tuple[str, ...], capture: bool) -> None:
        self._options = pytest_options, capture
        self._idle: dict[int, Pool] = {}  # the one that was used last comes last

    @contextmanager
    def lent(self, size: int, fresh: bool) -> Iterator[Pool]:
        """Yield a pool of ``size`` ranks; if the block raises, its ranks are killed.

        Args:
            size: the number of ranks.
            fresh: whether to start ranks that no other test uses.
        """
        pool = None if fresh else self._idle.pop(size, None)
        if pool is not None and not pool.is_alive():
            pool.kill()
            pool = None
        if pool is None:
            pool = Pool(size, *self._options)
        try:
            yield pool
        except BaseException:
            pool.kill()
            raise
        if fresh:
            pool.close()
            return
        self._idle[size] = pool
        if len(self._idle) > MOST_IDLE:
            self._idle.pop(next(iter(self._idle))).close()

    def close(self) -> None:
        """Let the ranks of all waiting pools leave."""
        while self._idle:
            self._idle.popitem()[1].close()


def _start(setup: RankSetup) -> Rank:
    setup.stacks.touch()
    context: Any = multiprocessing.get_context("forkserver" if FORKS else "spawn")
    ours, theirs = context.Pipe()
    with theirs:
        process = context.Process(target=rank_process.run, args=(setup, theirs), name=f"rank {setup.rank}")
        with _default_start_method_kept():
            process.start()
    return Rank(setup, process, ours)


@contextmanager
def _default_start_method_kept() -> Iterator[None]:
    """Restore multiprocessing's default start method after the block: starting a process fixes it, but only the user may set it, once."""
    method = multiprocessing.get_start_method(allow_none=True)
    yield
    multiprocessing.set_start_method(method, force=True)


def _end(rank: Rank) -> None:
    """Kill the process if it still runs, with everything that it has started."""
    if rank.process.is_alive():
        kill_group(rank.process.pid)
        rank.process.kill()
    rank.process.join()
    rank.process.close()
    rank.connection.close()


def collect(ranks: list[Rank], timeout: float) -> list[Report]:
    """The reports in the order in which the ranks' tests ended; those of stuck ranks are missing.

    Args:
        ranks: the ranks to wait for.
        timeout: how long to wait, in seconds; once a rank has failed to pass, at most ``GRACE`` longer.
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
    return Report(rank.setup.rank, "died", when, f"{how_ended(rank.process.exitcode)} before the test finished", rank.stacks())


def dump_stacks(ranks: list[Rank]) -> None:
    """Make each of ``ranks`` write its Python stacks, for :meth:`Rank.stacks`; a rank that is still starting ends without writing them.

    Windows has no signal for it, and shows none.
    """
    if sys.platform == "win32":
        return
    for rank in ranks:
        os.kill(rank.process.pid, signal.SIGQUIT)
        for child in rank.forked():
            with suppress(ProcessLookupError):
                if os.getpgid(child) == rank.process.pid:  # its pid may belong to another process by now
                    os.kill(child, signal.SIGQUIT)
    until = time.monotonic() + GRACE
    while time.monotonic() < until and any(rank.process.is_alive() and not rank.setup.stacks.stat().st_size for rank in ranks):
        time.sleep(0.05)
    time.sleep(0.1)  # a dump is written line by line


def _above_call(thread: str) -> str:
    """The stack of a ``thread``, the innermost call first, down to the call of the test."""
    above, _, rest = thread.partition(f'  File "{rank_process.__file__}"')
    return (above or rest).rstrip()


def _state_of(process: int) -> str:
    """The state of a ``process`` as Linux shows it: where in the kernel it is, and which signals it blocks and catches."""
    try:
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines() if ":\t" in line)
        place = Path(f"/proc/{process}/wchan").read_text()
    except OSError:
        return f"pid {process}, which has ended"
    return f"pid {process}, {status['State']} in {place}, blocks signals {status['SigBlk']} and catches {status['SigCgt']}"
