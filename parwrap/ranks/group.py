"""The process group of a ``World``: starts and stops it, and says which rank this is.

Only this file starts a process group. ``collectives.py`` has what users call to reduce and gather.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parwrap.errors import UsageError, in_one_line
from parwrap.messages import WARNING, tell
from parwrap.ranks.background import in_background
from parwrap.ranks.device import choose_backend, choose_device, current_device, torch_backend, uses_nccl
from parwrap.ranks.environment import attribute
from parwrap.ranks.rendezvous import met
from parwrap.ranks.world import World, detect
from parwrap.torch_private.distributed import abort_process_groups, quiet_gloo, set_default_group

__all__ = [
    "Group",
    "Observer",
    "alone",
    "alone_now",
    "current",
    "is_alone",
    "is_failure",
    "is_on_one_rank",
    "is_outside",
    "is_rank_zero",
    "is_reading_stream",
    "leave",
    "local_rank",
    "open_group",
    "opened",
    "rank",
    "reading_stream",
    "say",
    "within",
    "world_size",
]

TIMEOUT = timedelta(minutes=30)
"""How long ranks wait for each other unless a timeout is given; torch's default for gloo."""

LONG_WAIT = 30.0
"""Seconds after which rank 0 says that it waits for other ranks to start."""


class Observer:
    """What an open scope does where ranks of a group act together; here nothing."""

    def control_message(self, kind: str) -> AbstractContextManager[Callable[[], None]]:
        """The context manager in which a control message is sent; see :meth:`Group.control_message`."""
        return nullcontext(lambda: None)

    def whole(self, x: Any) -> bool:
        """Whether ``x`` is whole on each rank already, so that there is nothing to gather."""
        return False

    def after_barrier(self) -> None:
        """Called after each barrier: this rank may see the files of the other ranks."""

    def summed(self, equal: Callable[[], bool]) -> None:
        """Called after each ``reduce_sum`` and ``gather`` of the script; ``equal`` returns whether the numbers were equal on all ranks."""


@dataclass
class Group:
    """A started process group.

    Attributes:
        world: this process's place in the group.
        backend: ``"gloo"``, ``"nccl"``, ...
        device: the device that this rank trains on, and with nccl reduces numbers on.
        timeout: how long to wait for another rank.
        store: a key-value store that all ranks share; ``None``, like ``folder``, for a group that the user's own code has started.
        folder: a folder of this job that only this user can access, shared by the ranks of this node.
        control: a process group only for control messages, on the CPU, so that they never pair with a bucket of gradients.
        observer: what an open scope does where ranks act together.
    """

    world: World
    backend: str
    device: torch.device
    timeout: timedelta = TIMEOUT
    store: dist.Store | None = None
    folder: Path | None = None
    control: dist.ProcessGroup | None = None
    observer: Observer = field(default_factory=Observer)
    _connected: bool = False

    def connect(self) -> None:
        """Connect the ranks, once, while all of them are known to be here.

        A communicator of NCCL is made at its first collective, and nothing ends a rank that waits there for one that has failed. When the
        process group starts would be too early: a script sets variables of CUDA's allocator before CUDA starts.
        """
        if not self._connected and self.backend == "nccl":
            dist.all_reduce(torch.zeros(1, device=self.device))
            self._connected = True

    def control_message(self, kind: str) -> AbstractContextManager[Callable[[], None]]:
        """The context manager in which a control message of this ``kind`` is sent; in an open scope it checks lockstep.

        It yields a function to call while this rank waits outside of a collective.
        """
        return self.observer.control_message(kind)

    def all_reduce(self, kind: str, numbers: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """Reduce ``numbers`` of the CPU over the ranks, in a control message of this ``kind``, and return them."""
        with self.control_message(kind):
            dist.all_reduce(numbers, op, group=self.control)
        return numbers

    def on_all_ranks(self, kind: str, flags: Iterable[bool]) -> list[bool]:
        """For each of ``flags``, whether it is true on all ranks, which pass equally many."""
        return self.all_reduce(kind, torch.tensor([*flags], dtype=torch.int64), dist.ReduceOp.MIN).bool().tolist()

    def observed(self, observer: Observer) -> AbstractContextManager[None]:
        """Inside the block, ``observer`` is the group's."""
        return attribute(self, "observer", observer)


_current: Group | None = None
_outside: World | None = None
"""The world of a process that does not run the training loop; see :func:`within`."""
alone_now: list[tuple[int, bool]] = []
"""The threads that run something without the other ranks, each with the ``in_turn`` of :func:`alone`.

Where a call costs too much, ask ``alone_now and is_alone()``: the list is nearly always empty.
"""
_reading_stream: list[int] = []
"""The threads that read a stream; see :func:`reading_stream`."""


@contextmanager
def opened(world: World, backend: str | None = None, timeout: timedelta | None = None) -> Iterator[Group | None]:
    """Start the process group of ``world`` inside the block; for a single rank, yield ``None`` without a group.

    Without ``backend``, the device decides; without ``timeout``, torch's default counts.
    """
    global _current
    if world.size == 1:
        yield None
        return
    device = choose_device(world, backend)
    backend = choose_backend(backend, device)
    waiting = timeout or TIMEOUT
    with ExitStack() as meeting, _excepthook_kept():
        try:
            with _reporting_long_wait(world):
                world, store, folder = meeting.enter_context(met(world, waiting))
                # without a timeout, the process group keeps torch's default, which is 30 minutes for all backends except NCCL
                torchs = dist.PrefixStore("torch", store)
                with quiet_gloo():
                    dist.init_process_group(torch_backend(backend), store=torchs, rank=world.rank, world_size=world.size, timeout=timeout)
            with quiet_gloo():
                control = dist.new_group(backend="gloo", timeout=waiting)
            if not world.node_ranks:
                ranks = _ranks_of_node(world, control)
                world = replace(world, node_ranks=ranks, local_size=len(ranks))
            _current = Group(world, backend, device, waiting, dist.PrefixStore("parwrap", store), folder, control)
            with _naming_first_failure(_current):
                yield _current
        except BaseException as error:
            # NCCL would wait for what this rank has begun and the others may never take part in
            if backend == "nccl" and is_failure(error) and dist.is_initialized():
                abort_process_groups()
            raise
        finally:
            _current = None
            if dist.is_initialized():
                dist.destroy_process_group()


def _ranks_of_node(world: World, control: dist.ProcessGroup) -> tuple[int, ...]:
    """The ranks of this node, which a launcher may number in turn over the nodes."""
    nodes = [torch.empty(1, dtype=torch.int64) for _ in range(world.size)]
    dist.all_gather(nodes, torch.tensor([world.node_rank]), group=control)
    return tuple(rank for rank, node in enumerate(nodes) if node.item() == world.node_rank)


@contextmanager
def _excepthook_kept() -> Iterator[None]:
    """Restore ``sys.excepthook``, which torch wraps for each process group. After an error torch's hook stays: it names the rank."""
    before = sys.excepthook
    yield
    if getattr(sys.excepthook, "__module__", None) == dist.distributed_c10d.__name__:  # else the user's own
        sys.excepthook = before


@contextmanager
def _reporting_long_wait(world: World) -> Iterator[None]:
    """Print a message on rank 0 if the ranks take long to meet, because rank 0 may be the only rank."""

    def report(stopped: threading.Event) -> None:
        if not stopped.wait(LONG_WAIT):
            tell(
                f"rank 0 waits for the other ranks of {world.size} to start. The world size comes from {world.launcher}; if "
                "this process is the only one, set PARWRAP_WORLD_SIZE=1."
            )

    with nullcontext() if world.rank else in_background(report, "parwrap beginning"):
        yield


def current() -> Group | None:
    """The process group that parwrap has started, if any."""
    return _current


def open_group() -> Group | None:
    """The process group that parwrap or the user's own code has started, if any."""
    if _current is not None or _outside is not None:
        return _current
    if not dist.is_initialized():
        return None
    return Group(World(dist.get_rank(), dist.get_world_size()), "nccl" if uses_nccl() else dist.get_backend(), current_device())


@contextmanager
def within(group: Group | None, process_group: dist.ProcessGroup | None, world: World) -> Iterator[None]:
    """Make ``group``, a group of some of the ranks, the open group inside the block. The other ranks pass ``None`` and act alone.

    Args:
        group: the group of these ranks.
        process_group: torch's group of these ranks, in which collectives run by default.
        world: the place of this process.
    """
    global _current, _outside
    before, default = (_current, _outside), dist.group.WORLD
    _current, _outside = group, world if group is None else None
    if group is not None:
        set_default_group(process_group)
    try:
        yield
    finally:
        _current, _outside = before
        set_default_group(default)


def leave() -> None:
    """Let this process, which a rank has forked, act alone. It keeps the rank's number."""
    global _current, _outside
    if _current is not None:
        _outside = _current.world
        _current = None


def is_outside() -> bool:
    """Whether this process does not run the training loop, and so acts alone: a parameter server, or a process that a rank has forked."""
    return _outside is not None


@contextmanager
def alone(in_turn: bool = False) -> Iterator[None]:
    """Declare that only this rank runs the block now, so nothing in it may wait for other ranks.

    Args:
        in_turn: whether the other ranks run the block too, before or after this one.
    """
    entry = threading.get_ident(), in_turn
    alone_now.append(entry)
    try:
        yield
    finally:
        alone_now.remove(entry)


def is_alone() -> bool:
    """Whether only this rank runs the calling code now; see :func:`alone`."""
    return bool(alone_now) and any(thread == threading.get_ident() for thread, _ in alone_now)


def is_on_one_rank() -> bool:
    """Whether no other rank ever runs the calling code, so what it builds is on this rank only; see :func:`alone`."""
    return (threading.get_ident(), False) in alone_now


@contextmanager
def reading_stream() -> Iterator[None]:
    """Declare that the block reads a stream that parwrap divides by rank: the stream's own code must not divide it again."""
    thread = threading.get_ident()
    _reading_stream.append(thread)
    try:
        yield
    finally:
        _reading_stream.remove(thread)


def is_reading_stream() -> bool:
    """Whether the calling code runs inside :func:`reading_stream`."""
    return bool(_reading_stream) and threading.get_ident() in _reading_stream


def _world() -> World:
    if is_reading_stream():
        raise UsageError(
            "an IterableDataset asks for the rank or the number of ranks while it is read, to divide itself, but parwrap divides it too: "
            "each rank takes every N-th sample. Wrap its loader in parwrap.replicate(loader), so that each rank reads all that it yields."
        )
    return _world_now()


def _world_now() -> World:
    if _current is not None:
        return _current.world
    if _outside is None and dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size())
    return _outside or detect(os.environ)


def say(text: str, level: int = WARNING) -> None:
    """Print a line on rank 0, above progress bars; also while a stream is read."""
    if _world_now().rank == 0:
        tell(text, level)


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
    return _world().size


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


def is_failure(error: BaseException) -> bool:
    """Whether ``error`` ends a rank with another status than 0."""
    return not isinstance(error, SystemExit) or bool(error.code)


@contextmanager
def _naming_first_failure(group: Group) -> Iterator[None]:
    """If an exception leaves the block after another rank has failed, add a note about that failure, on Python 3.11 and later.

    Most launchers show the errors of all ranks, in any order.
    """
    try:
        yield
    except BaseException as error:
        if not is_failure(error) or group.store is None:
            raise
        cause = in_one_line(error)
        first = f"{group.world.rank} {cause}"
        with suppress(RuntimeError):  # the store has ended with the rank that hosts it
            first = group.store.compare_set("first failure", "", first).decode()
        rank, _, firsts_cause = first.partition(" ")
        if firsts_cause != cause and isinstance(error, Exception) and hasattr(error, "add_note"):
            error.add_note(f"parwrap: rank {rank} of {group.world.size} failed first: {firsts_cause}")
        raise
