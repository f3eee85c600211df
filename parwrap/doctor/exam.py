"""The examination: gathers the ranks' facts, lets them measure together, and ends in time even if something hangs.

Launched ranks send their facts to rank 0 before they start a process group, so that rank 0 has them even if the start fails. A process that
is not a launched rank becomes rank 0 of a few ranks that it starts for the self test.
"""

from __future__ import annotations

import math
import multiprocessing
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from parwrap.doctor.facts import Clock, Examination, Facts, Row, SelfTest
from parwrap.doctor.measure import all_reduces, clocks
from parwrap.errors import LaunchError, ParwrapError
from parwrap.ranks.background import in_background
from parwrap.ranks.group import opened
from parwrap.ranks.platform import FORKS
from parwrap.ranks.rendezvous import job_folder, met
from parwrap.ranks.store import SignedStore
from parwrap.ranks.world import World

__all__ = ["Exam", "examination", "in_time"]

PATIENT = 0.8
"""The fraction of the timeout for which ranks wait for each other, so that torch can still name what they waited for."""

LOOK = 0.05
"""Seconds between two looks for the facts of a rank."""

_START_METHOD = "fork" if FORKS else "spawn"
"""How the doctor starts ranks for the self test."""


@contextmanager
def examination(facts: Facts, world: World, timeout: float, backend: str | None) -> Iterator[Exam]:
    """Yield the exam of this process. If no launcher has started several ranks, start two, or with nccl as many as there are GPUs, if more.

    Args:
        facts: this rank's facts.
        world: this rank's place.
        timeout: the time limit in seconds.
        backend: the backend that the user asks for.
    """
    if world.size > 1:
        yield Exam(facts, world, facts.backend, timeout)
        return
    gpus = len(facts.gpus.seen)
    backend = backend or ("nccl" if gpus > 1 else "gloo")
    size = max(gpus, 2) if backend == "nccl" else 2
    with job_folder() as folder:
        worlds = [World(rank, size, rank, size, 0, None, f"parwrap://job/{folder.name}") for rank in range(size)]
        context: Any = multiprocessing.get_context(_START_METHOD)
        for other in worlds[1:]:
            context.Process(target=_examine, args=(facts, other, backend, timeout), daemon=True).start()
        yield Exam(facts, worlds[0], backend, timeout)


def _examine(facts: Facts, world: World, backend: str, timeout: float) -> None:
    Exam(facts, world, backend, timeout).run()


class Exam:
    """An examination that can be read at any time, from any thread. At the end, rank 0 has all results.

    Args:
        facts: this rank's facts.
        world: this rank's place in the self test.
        backend: the backend of the self test.
        timeout: the time limit in seconds.

    Attributes:
        ends: when the time is over, in seconds of ``time.monotonic``.
        launched: whether a launcher has started the ranks.
        known: the facts that have arrived here so far, by rank.
        stage: what this rank does now, in words.
        device: the device of the self test.
        rows, clocks: what was measured so far.
        skipped: why the self test is skipped; ``None`` if it is not.
        failure: why the examination has failed; ``None`` if it has not.
    """

    def __init__(self, facts: Facts, world: World, backend: str, timeout: float) -> None:
        self.facts, self.world, self.backend = facts, world, backend
        self.timeout, self.ends = timeout, time.monotonic() + timeout
        self.launched = world.launcher is not None
        self.known = {facts.launch.rank: facts}
        self.stage = f"waiting for all ranks to meet at {self._meeting_place()}"
        self.device = facts.device if self.launched or backend == "nccl" else "cpu"
        self.rows: list[Row] = []
        self.clocks: list[Clock] = []
        self.skipped: str | None = None
        self.failure: str | None = None
        self._held = ExitStack()
        self._store: SignedStore | None = None
        self._watched: SignedStore | None = None
        """The same store, for other threads."""

    def run(self) -> None:
        """Run the examination, and remember a failure."""
        try:
            self._run()
        except Exception as error:
            self.failure = _in_a_line(error)
            if self._store is not None and self.world.rank > 0:
                with suppress(RuntimeError, ValueError):
                    self._store.set(f"stage of {self.world.rank}", f"{self.stage}: {self.failure}")
        else:
            self._held.close()

    def overdue(self) -> None:
        """Record that the examination has not ended in time."""
        self.failure = f"not finished after {self.timeout:g} s"

    def outcome(self) -> Examination:
        """The results so far."""
        known = dict(self.known)
        stages = self._stages() if self.failure else {}
        some_joined = self.launched and len(known) > 1
        missing = [rank for rank in range(self.world.size) if rank not in known] if self.failure and some_joined else []
        by = "launched" if self.launched else f"{_START_METHOD}ed"
        test = SelfTest(
            *(by, self.world.size, self.backend, self.device, list(self.rows), self.clocks, self.skipped, self.failure, stages, missing)
        )
        return Examination([known[rank] for rank in sorted(known)], test)

    def wait_until_reported(self) -> None:
        """Wait until rank 0 has reported or the time is over, because a launcher may end rank 0 when this rank ends."""
        if self._watched is None or not self.launched:
            return
        with suppress(RuntimeError, ValueError):
            if self.world.rank == 0:
                self._watched.set("reported", True)
            while not self._watched.has("reported") and time.monotonic() < self.ends + 1:
                time.sleep(LOOK)

    def _run(self) -> None:
        rank, size = self.world.rank, self.world.size
        # a store of torch's waits up to a second longer
        timeout = timedelta(seconds=max(1, math.floor(PATIENT * self.timeout) - 1))
        self._store = SignedStore(self._held.enter_context(met(self.world, timeout)).store, "doctor")
        self._watched = self._store.clone()
        if self.launched and not self._compare(self._store):
            self.skipped = "ranks would use different backends, and wait for each other forever"
            self._part(self._store)
            return
        self._at("starting the process group")
        with opened(self.world, self.backend, timeout) as group:
            assert group is not None
            self.device = group.device.type if group.backend == "nccl" else "cpu"
            for row in all_reduces(rank, size, group.device if group.backend == "nccl" else "cpu", self._at):
                self.rows.append(row)
            if self.launched:
                self._at("comparing clocks")
                self.clocks = clocks(self._store, rank, size)
            self._at("leaving the process group")
        self._part(self._store)

    def _at(self, stage: str) -> None:
        """Report that this rank is at ``stage`` now."""
        self.stage = stage
        if self._store is not None:
            self._store.set(f"stage of {self.world.rank}", stage)

    def _compare(self, store: SignedStore) -> bool:
        """Send rank 0 the facts. Returns whether all ranks would use the same backend."""
        self._at("sending rank 0 its facts")
        store.set(f"facts of {self.world.rank}", asdict(self.facts))
        if self.world.rank == 0:
            latest = self.ends - (1 - PATIENT) * self.timeout
            missing = set(range(1, self.world.size))
            while missing:  # the ranks that have joined are known even if another one never joins
                for rank in [rank for rank in missing if store.has(f"facts of {rank}")]:
                    self.known[rank] = Facts.of_json(store.get(f"facts of {rank}", dict))
                    missing.remove(rank)
                if missing and time.monotonic() > latest:
                    raise LaunchError("not all ranks have joined")
                time.sleep(LOOK)
            store.set("same backend", len({facts.backend for facts in self.known.values()}) == 1)
        return store.get("same backend", bool)

    def _part(self, store: SignedStore) -> None:
        """Leave the store, rank 0 last, because it may host the store."""
        if self.world.rank > 0:
            store.set(f"{self.world.rank} has left", True)
        else:
            for rank in range(1, self.world.size):
                store.get(f"{rank} has left", bool)

    def _stages(self) -> dict[int, str]:
        """The stage of each rank, as last reported."""
        stages = {self.world.rank: self.stage}
        if self._watched is not None:
            with suppress(RuntimeError, ValueError):
                for rank in range(self.world.size):
                    if self._watched.has(f"stage of {rank}"):
                        stages[rank] = self._watched.get(f"stage of {rank}", str)
        return stages

    def _meeting_place(self) -> str:
        if self.world.init_method == "env://":
            return ":".join(self.facts.launch.variables.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        return self.world.init_method or "an unknown place"


@contextmanager
def in_time(exam: Exam, give_up: Callable[[], None]) -> Iterator[None]:
    """Call ``give_up`` if the block is still running when ``exam`` is overdue.

    Another thread calls it, because the main one may hang forever.
    """

    def watch(stopped: threading.Event) -> None:
        if not stopped.wait(exam.ends - time.monotonic()):
            exam.overdue()
            give_up()

    with in_background(watch, "parwrap doctor"):
        yield


def _in_a_line(error: Exception) -> str:
    text = next((line for line in str(error).splitlines() if line.strip()), "")
    text = re.sub(r"^\[(enforce fail at )?\S+:\d+\] ", "", text)  # gloo's source; generic advice follows
    text = text.partition(" This is typically caused by")[0].strip(" .")
    return text if isinstance(error, ParwrapError) else f"{type(error).__name__}: {text}"
