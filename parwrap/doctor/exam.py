"""The examination: gathers the ranks' facts, lets them measure together, and ends in time even if something hangs.

Launched ranks send their facts to rank 0 before they start a process group, so that rank 0 has them even if that fails. If the process is
not a launched rank, it forks ranks for the self test.
"""

from __future__ import annotations

import math
import mmap
import pickle
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from parwrap.doctor.facts import Clock, Examination, Facts, Row, SelfTest
from parwrap.doctor.measure import all_reduces, clocks
from parwrap.errors import ParwrapError
from parwrap.group import group as groups
from parwrap.group.collectives import home
from parwrap.inline.launching import run_on_ranks
from parwrap.system.background import in_background
from parwrap.world.world import World

__all__ = ["Exam", "ForkedExam", "LaunchedExam", "in_time"]

PATIENT = 0.8
"""The fraction of the timeout for which ranks wait for each other, so that torch can still name what they waited for."""

LONGEST_STAGE = 200


class Exam:
    """An examination that can be read at any time, from any thread.

    Args:
        facts: this rank's facts.
        timeout: the time limit in seconds.
    """

    by = ""

    def __init__(self, facts: Facts, timeout: float) -> None:
        self.facts, self.known = facts, {facts.launch.rank: facts}
        self.timeout, self.ends = timeout, time.monotonic() + timeout
        self.ranks, self.backend, self.device = facts.launch.size, facts.backend, "cpu"
        self.stage = ""
        self.rows: list[Row] = []
        self.clocks: list[Clock] = []
        self.skipped: str | None = None
        self.failure: str | None = None

    @property
    def rank_timeout(self) -> timedelta:
        """How long a rank waits for another one."""
        return timedelta(seconds=max(1, math.floor(PATIENT * self.timeout) - 1))  # a store of torch's waits up to a second longer

    def run(self) -> None:
        """Run the examination, and remember a failure."""
        try:
            self._run()
        except Exception as error:
            self.failure = _in_a_line(error)

    def overdue(self) -> None:
        """Record that the examination has not ended in time."""
        self.failure = f"not finished after {self.timeout:g} s"

    def outcome(self) -> Examination:
        """The results so far."""
        known = dict(self.known)
        stages = self.stages() if self.failure else {}
        missing = [] if not self.failure or len(known) == 1 else [rank for rank in range(self.facts.launch.size) if rank not in known]
        test = SelfTest(
            self.by, self.ranks, self.backend, self.device, list(self.rows), self.clocks, self.skipped, self.failure, stages, missing
        )
        return Examination([known[rank] for rank in sorted(known)], test)

    def stages(self) -> dict[int, str]:
        """The stage of each rank, as last reported."""
        return {}

    def wait_until_reported(self) -> None:
        """Wait until rank 0 has reported the failure."""

    def _run(self) -> None:
        raise NotImplementedError


class ForkedExam(Exam):
    """The self test of forked ranks: one for each GPU if there are several, otherwise two on the CPU."""

    by = "forked"

    def __init__(self, facts: Facts, timeout: float, backend: str | None) -> None:
        super().__init__(facts, timeout)
        gpus = len(facts.gpus.seen)
        self.backend = backend or ("nccl" if gpus > 1 else "gloo")
        self.ranks = max(gpus, 2) if self.backend == "nccl" else 2
        self.device = "cuda" if self.backend == "nccl" else "cpu"
        # shared with forks, and in no file system, which may be full or read-only
        self._stages = [mmap.mmap(-1, LONGEST_STAGE) for _ in range(self.ranks)]

    def stages(self) -> dict[int, str]:
        stages = [stage[:].rstrip(b"\0").decode(errors="replace") for stage in self._stages]
        return {rank: stage or "starting the process group" for rank, stage in enumerate(stages)}

    def _run(self) -> None:
        self.rows = run_on_ranks(self._rank, self.ranks, self.rank_timeout, self.backend)

    def _rank(self) -> list[Row]:
        group = groups.current()
        assert group is not None
        mine = self._stages[group.world.rank]

        def report(stage: str) -> None:
            mine[:] = stage.encode()[:LONGEST_STAGE].ljust(LONGEST_STAGE, b"\0")

        rows = list(all_reduces(group.world.rank, group.world.size, home(group), report))
        report("through")
        return rows


class LaunchedExam(Exam):
    """Examine launched ranks. At the end, rank 0 has all results, and the others have what they need."""

    by = "launched"

    def __init__(self, facts: Facts, timeout: float, world: World) -> None:
        super().__init__(facts, timeout)
        master = ":".join(facts.launch.variables.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        place = master if world.init_method == "env://" else world.init_method or "an unknown place"
        self._world, self.stage = world, f"waiting for all ranks to meet at {place}"
        self._held = ExitStack()
        self._store: Any = None
        self._status_store: Any = None
        self._lock = threading.Lock()

    def stages(self) -> dict[int, str]:
        stages = {self._world.rank: self.stage}
        if self._status_store is not None:
            with self._lock, suppress(RuntimeError, ValueError):
                for rank in range(self._world.size):
                    if self._status_store.check([f"stage/{rank}"]):
                        stages[rank] = self._status_store.get(f"stage/{rank}").decode(errors="replace")
        return stages

    def report(self, stage: str) -> None:
        """Report that this rank is at ``stage`` now."""
        self.stage = stage
        if self._store is not None:
            self._store.set(f"stage/{self._world.rank}", stage)

    def run(self) -> None:
        super().run()
        if self.failure is None:
            self._held.close()
        elif self._store is not None and self._world.rank > 0:
            with suppress(RuntimeError, ValueError):
                self._store.set(f"stage/{self._world.rank}", f"{self.stage}: {self.failure}")

    def wait_until_reported(self) -> None:
        """Let rank 0 report before this rank ends, because a launcher would then end rank 0."""
        if self._status_store is None:
            return
        with suppress(RuntimeError, ValueError):
            if self._world.rank == 0:
                self._status_store.set("reported", "")
            else:
                self._status_store.wait(["reported"], timedelta(seconds=max(0.1, self.ends + 1 - time.monotonic())))
            self._held.close()

    def _run(self) -> None:
        world = self._world
        rendezvous = self._held.enter_context(closing(dist.rendezvous(world.rendezvous, world.rank, world.size, timeout=self.rank_timeout)))
        store, _, _ = next(rendezvous)
        self._store = dist.PrefixStore("parwrap/doctor", store)
        self._store.set_timeout(self.rank_timeout)
        self._status_store = self._store.clone()
        self._status_store.set_timeout(timedelta(seconds=1))
        self.report("sending rank 0 its facts")
        self._store.set(f"facts/{world.rank}", pickle.dumps(self.facts))
        if world.rank == 0:
            self._collect()
        backend = self._store.get("backend").decode()
        if not backend:
            self.skipped = "ranks would use different backends, and wait for each other forever"
            self._part()
            return
        self.report("starting the process group")
        with groups.opened(world, backend, self.rank_timeout) as group:
            assert group is not None
            device = home(group)
            self.device = device.type
            for row in all_reduces(world.rank, world.size, device, self.report):
                self.rows.append(row)
            self.report("comparing clocks")
            self.clocks = clocks(dist.PrefixStore("clocks", self._store), world.rank, world.size)
            self.report("leaving the process group")
        self._part()

    def _part(self) -> None:
        """Leave the store, rank 0 last, because it may host the store."""
        if self._world.rank > 0:
            self._store.set(f"parted/{self._world.rank}", "")
        else:
            self._store.wait([f"parted/{rank}" for rank in range(1, self._world.size)])

    def _collect(self) -> None:
        latest = self.ends - (1 - PATIENT) * self.timeout
        for rank in range(self._world.size):
            # the ranks that have joined are known even if another one never joins
            with suppress(RuntimeError):
                self._store.wait([f"facts/{rank}"], timedelta(seconds=max(0.1, latest - time.monotonic())))
                self.known[rank] = pickle.loads(self._store.get(f"facts/{rank}"))
        if len(self.known) < self._world.size:
            raise RuntimeError("not all ranks have joined")
        backends = {facts.backend for facts in self.known.values()}
        self._store.set("backend", backends.pop() if len(backends) == 1 else "")


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
