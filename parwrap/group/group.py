"""The process group of a :class:`World`: starts and stops it, identifies this rank, and passes values to other ranks through its store.

Only this file starts a process group. ``sync_points.py`` synchronizes the ranks; ``collectives.py`` has what users call to reduce and
gather.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from parwrap.coordination import status_board
from parwrap.coordination.sync_points import Coordinator
from parwrap.group.device import choose_backend, choose_device, torch_backend, uses_nccl
from parwrap.group.rendezvous import on_loopback, placed
from parwrap.system.background import in_background
from parwrap.system.remote_exception import in_one_line
from parwrap.torch_private.distributed import abort_process_groups, collective_count, set_default_group
from parwrap.world.world import World, detect

__all__ = [
    "Group",
    "alone",
    "current",
    "is_alone",
    "is_outside_loop",
    "is_rank_zero",
    "local_rank",
    "open_group",
    "opened",
    "rank",
    "together",
    "within",
    "world_size",
]

PATIENCE = timedelta(minutes=30)
"""How long ranks wait for each other unless a timeout is given; torch's default for gloo."""

TELLING = 30.0
"""Seconds after which rank 0 says that it waits for other ranks to start."""

POLLING = 0.005
"""Seconds between two reads of the store. The store itself cannot wait for any one of several keys."""

NO_THREAD = 0
"""Stands for the thread when each rank runs something separately while only rank 0 writes files."""


@dataclass
class Group:
    """A started process group.

    Attributes:
        world: this process's place in the group.
        backend: ``"gloo"``, ``"nccl"``, ...
        device: the device that this rank trains on, and reduces numbers on.
        store: a key-value store that all ranks share, for values that are exchanged without a collective.
        timeout: how long to wait for another rank.
        coordinator: this rank's sync points with the others; ``None``, like ``store``, for a group that the user's own code has started.
        alone_in: the threads in which ranks now run something separately, for :func:`is_alone`; usually none.
    """

    world: World
    backend: str
    device: torch.device
    store: Any
    timeout: timedelta
    coordinator: Any
    alone_in: list[int] = field(default_factory=lambda: _alone)
    _made: dict[Hashable, Any] = field(default_factory=dict)
    _ends: ExitStack = field(default_factory=ExitStack)

    def once(self, key: Hashable, make: Callable[[], AbstractContextManager]) -> Any:
        """The value of the context manager ``make()``, which is entered on first use and left when the process group stops."""
        if key not in self._made:
            self._made[key] = self._ends.enter_context(make())
        return self._made[key]

    def synchronize(self, kind: str, detail: int = 0) -> list[int]:
        """Wait for the other ranks, as in :meth:`Coordinator.wait`. Returns the ranks that synchronize for ``kind``."""
        return self.coordinator.wait(kind, detail=detail) if self.coordinator else list(range(self.world.size))

    def key(self, topic: str) -> str:
        """A key in the store for ``topic``, the same on all ranks and new after each sync point."""
        return f"{topic}/{self.coordinator.number}"

    def exchange(self, topic: str, value: Any) -> dict[int, Any]:
        """Synchronize for ``topic``, and return the ``value`` of every rank that takes part, by rank.

        Args:
            topic: the name of the value in errors.
            value: anything small that pickles.

        Raises:
            RankMismatchError: a rank did not arrive in time, or does something else that cannot wait.
        """
        return self.share(topic, value, self.synchronize(topic))

    def share(self, topic: str, value: Any, among: Iterable[int]) -> dict[int, Any]:
        """The ``value`` of each rank in ``among``, which are at the same point, by rank. This rank's own value may be omitted."""
        key = self.key(topic)
        self.store.set(f"{key}/{self.world.rank}", pickle.dumps(value))
        return {rank: pickle.loads(self.fetch(f"{key}/{rank}", rank, topic)) for rank in among}

    def fetch(self, key: str, owner: int, purpose: str) -> bytes:
        """The value that rank ``owner`` stores under ``key`` at the same point."""
        try:
            self.store.wait([key], self.timeout)
        except RuntimeError as error:
            # each kind of store has a different exception
            if "timeout" not in str(error).lower():
                raise
            raise self.coordinator.in_vain(purpose, owner) from None
        return self.store.get(key)

    @property
    def clock(self) -> int:
        """The number of sync points that this rank has passed: the same on all ranks at the same point of the script."""
        return self.coordinator.number + collective_count(dist.group.WORLD)

    def wait_until(self, ready: Callable[[], bool], owner: int, purpose: str) -> None:
        """Wait until ``ready()``, which checks the store for a value of rank ``owner``, returns true."""
        deadline = time.monotonic() + self.timeout.total_seconds()
        try:
            while not ready():
                self.coordinator.fetching(purpose)
                self.coordinator.hold_up(owner)
                if time.monotonic() > deadline:
                    raise self.coordinator.in_vain(purpose, owner)
                time.sleep(POLLING)
        finally:
            self.coordinator.fetched()


_current: Group | None = None
_outside_loop: World | None = None
_opened = 0
_alone: list[int] = []


@contextmanager
def opened(world: World, backend: str | None = None, timeout: timedelta | None = None) -> Iterator[Group | None]:
    """Start the process group of ``world`` inside the block; for a single rank, yield ``None`` without a group."""
    global _current, _opened
    if world.size == 1:
        yield None
        return
    device = choose_device(world, backend)
    backend = choose_backend(backend, device)
    waiting = timeout or PATIENCE
    # without a timeout, the process group keeps torch's default, which is 30 minutes for all backends except NCCL
    rendezvous = dist.rendezvous(world.rendezvous, world.rank, world.size, timeout=waiting)
    with _reporting_long_wait(world):
        store, _, _ = next(rendezvous)
        # a launcher's store outlives a process group, and the next one must not read the last one's keys
        _opened += 1
        torchs, store = dist.PrefixStore(f"torch/{_opened}", store), dist.PrefixStore(f"parwrap/{_opened}", store)
        world = placed(world, store)
    with closing(rendezvous), on_loopback(world), _excepthook_kept():
        try:
            with _reporting_long_wait(world):
                dist.init_process_group(torch_backend(backend), store=torchs, rank=world.rank, world_size=world.size, timeout=timeout)
            with status_board.opened(world, store) as entries:
                _current = Group(world, backend, device, store, waiting, Coordinator(entries, waiting, backend == "nccl"))
                with _current._ends, _naming_first_failure(world, store):
                    yield _current
        except BaseException as error:
            # NCCL would wait for what this rank has begun and the others may never take part in
            if backend == "nccl" and _is_failure(error) and dist.is_initialized():
                abort_process_groups()
            raise
        finally:
            _current = None
            if dist.is_initialized():
                dist.destroy_process_group()


@contextmanager
def _excepthook_kept() -> Iterator[None]:
    """Restore ``sys.excepthook``, which torch wraps in each process group. After an error the hook stays, because it names the rank."""
    before = sys.excepthook
    yield
    if getattr(sys.excepthook, "__module__", None) == dist.distributed_c10d.__name__:  # else the user's own
        sys.excepthook = before


@contextmanager
def _reporting_long_wait(world: World) -> Iterator[None]:
    """Inside the block, ranks wait for each other to begin.

    Print a message on rank 0 if this takes long, because it may be the only rank.
    """

    def report(stopped: threading.Event) -> None:
        if not stopped.wait(TELLING):
            print(
                f"parwrap: rank 0 waits for the other ranks of {world.size} to start. The world size comes from {world.launcher}; if "
                "this process is the only one, set PARWRAP_WORLD_SIZE=1.",
                file=sys.stderr,
            )

    with nullcontext() if world.rank else in_background(report, "parwrap beginning"):
        yield


def current() -> Group | None:
    """The process group that parwrap has started, if any."""
    return _current


@contextmanager
def within(group: Group | None, process_group: Any, world: World) -> Iterator[None]:
    """Make ``group`` the open group inside the block. With ``None``, this process acts alone.

    Args:
        group: some of the ranks of the open group.
        process_group: torch's group of those ranks, the default of collectives.
        world: the world of a process outside of ``group``, with the number of ranks in it.
    """
    global _current, _outside_loop
    before, default = (_current, _outside_loop), dist.group.WORLD
    _current, _outside_loop = group, world if group is None else None
    if group is not None:
        set_default_group(process_group)
    try:
        yield
    finally:
        _current, _outside_loop = before
        if group is not None:
            set_default_group(default)


def is_outside_loop() -> bool:
    """Whether this process is not among the ranks that run the loop, like a parameter server: it does on its own what they do together."""
    return _outside_loop is not None


@contextmanager
def alone(each: bool = False) -> Iterator[None]:
    """Declare that only this rank runs the block, so nothing in it may wait for other ranks.

    With ``each``, every rank runs it separately.
    """
    _alone.append(NO_THREAD if each else threading.get_ident())
    try:
        yield
    finally:
        _alone.pop()


@contextmanager
def together() -> Iterator[None]:
    """Let ranks act together again in a block within ``alone(each=True)``."""
    lifted = _alone.count(NO_THREAD)
    _alone[:] = [thread for thread in _alone if thread != NO_THREAD]
    try:
        yield
    finally:
        _alone.extend([NO_THREAD] * lifted)


def is_alone(here: bool = False) -> bool:
    """Whether this rank must not wait for other ranks now; with ``here``, whether it alone runs the code of the present thread."""
    return bool(_alone) and (not here or threading.get_ident() in _alone)


def _world() -> World:
    group = open_group()
    return group.world if group else _outside_loop or detect(os.environ)


def rank() -> int:
    """The number of this process among all ranks, from 0.

    >>> rank()
    0
    """
    return _world().rank


def world_size() -> int:
    """The number of ranks.

    >>> world_size()
    1
    """
    return dist.get_world_size() if open_group() else _world().size  # parwrap watches torch's function to find out who shards with it


def local_rank() -> int:
    """The number of this process among the ranks of its node, from 0.

    >>> local_rank()
    0
    """
    return _world().local_rank


def is_rank_zero() -> bool:
    """Whether this is rank 0, which prints and saves.

    >>> is_rank_zero()
    True
    """
    return rank() == 0


def open_group() -> Group | None:
    """The process group that parwrap or the user's own code has started, if any."""
    if _current is not None or _outside_loop is not None:
        return _current
    if not dist.is_initialized():
        return None
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    backend = "nccl" if uses_nccl() else dist.get_backend()
    return Group(World(dist.get_rank(), dist.get_world_size()), backend, device, store=None, timeout=PATIENCE, coordinator=None)


def _is_failure(error: BaseException) -> bool:
    return not isinstance(error, SystemExit) or bool(error.code)


@contextmanager
def _naming_first_failure(world: World, store: dist.Store) -> Iterator[None]:
    """If an exception leaves the block after another rank has failed, add a note about that failure, on Python 3.11 and later.

    Most launchers show the errors of all ranks, in any order.

    Args:
        world: this rank's place.
        store: the store of the process group.
    """
    try:
        yield
    except BaseException as error:
        if not _is_failure(error):
            raise
        cause = in_one_line(error)
        first = f"{world.rank} {cause}"
        with suppress(RuntimeError):  # the store has ended with the rank that hosts it
            first = store.compare_set("first failure", "", first).decode()
        rank, _, firsts_cause = first.partition(" ")
        if firsts_cause != cause and isinstance(error, Exception) and hasattr(error, "add_note"):
            error.add_note(f"parwrap: rank {rank} of {world.size} failed first: {firsts_cause}")
        raise
