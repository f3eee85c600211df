"""The process group of a :class:`World`: starting and stopping it, who this rank is, and meeting the others by way of its store.

Only this file starts a process group. What users call to reduce and gather is in ``collectives.py``.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from parwrap.device import choose_backend, choose_device
from parwrap.errors import RankMismatchError
from parwrap.world import World, read_world

__all__ = [
    "Group",
    "alone",
    "current",
    "is_alone",
    "is_rank_zero",
    "local_rank",
    "open_group",
    "opened",
    "rank",
    "world_size",
]

PATIENCE = timedelta(minutes=30)
"""How long ranks wait for each other unless a timeout is given; what torch takes for gloo."""

POLLING = 0.005
"""Seconds between two looks into the store, which can only wait for all of several keys."""


@dataclass
class Group:
    """A started process group.

    Attributes:
        world: this process's place in it.
        backend: ``"gloo"``, ``"nccl"``, ...
        device: where this rank trains, and where its numbers are put to be reduced.
        store: a key-value store that all ranks share, for what must not cost a collective.
        timeout: how long to wait for another rank.
    """

    world: World
    backend: str
    device: torch.device
    store: Any
    timeout: timedelta
    _meetings: Counter = field(default_factory=Counter)

    def meeting(self, topic: str) -> str:
        """A new key in the store, the same on all ranks: ranks meet in the order in which they come to ``topic``."""
        self._meetings[topic] += 1
        return f"{topic}/{self._meetings[topic]}"

    def exchange(self, topic: str, value: Any) -> list[Any]:
        """Every rank's ``value``, in the order of ranks, by way of the store; ranks meet in the order of their calls.

        Args:
            topic: what the value is, for the error text.
            value: anything small that pickles.

        Raises:
            RankMismatchError: a rank did not come in time.
        """
        meeting = self.meeting(topic)
        self.store.set(f"{meeting}/{self.world.rank}", pickle.dumps(value))
        return [pickle.loads(self.fetch(f"{meeting}/{rank}", rank, topic)) for rank in range(self.world.size)]

    def fetch(self, key: str, owner: int, purpose: str) -> bytes:
        """What rank ``owner`` stores under ``key``, waited for."""
        try:
            self.store.wait([key], self.timeout)
        except RuntimeError as error:
            # each kind of store has an exception of its own
            if "timeout" not in str(error).lower():
                raise
            raise self._in_vain(owner, purpose) from None
        return self.store.get(key)

    @property
    def clock(self) -> int:
        """How often this rank has met the others: at the same point of the script the same on all ranks."""
        return dist.group.WORLD._get_sequence_number_for_group() + self._meetings.total()  # type: ignore[union-attr]

    def wait_until(self, ready: Callable[[], bool], owner: int, purpose: str) -> None:
        """Return when ``ready()``, which looks into the store for what rank ``owner`` puts there."""
        deadline = time.monotonic() + self.timeout.total_seconds()
        while not ready():
            if time.monotonic() > deadline:
                raise self._in_vain(owner, purpose)
            time.sleep(POLLING)

    def _in_vain(self, owner: int, purpose: str) -> RankMismatchError:
        return RankMismatchError(
            f"rank {self.world.rank} waited {self.timeout.total_seconds():g} s for rank {owner} at the same point ({purpose}), in vain. "
            "That rank has ended, is stuck or took another way through the script; if it is only slow, raise timeout=."
        )


_current: Group | None = None
_opened = 0
_alone: list[int] = []


@contextmanager
def opened(world: World, backend: str | None = None, timeout: timedelta | None = None) -> Iterator[Group | None]:
    """Start the process group of ``world`` for the length of the block; ``None`` and nothing started for a single rank."""
    global _current, _opened
    if world.size == 1:
        yield None
        return
    device = choose_device(world, backend)
    backend = choose_backend(backend, device)
    waiting = timeout or PATIENCE
    # without a timeout of its own the process group keeps torch's, which differs by backend
    store, _, _ = next(dist.rendezvous(world.init_method, world.rank, world.size, timeout=waiting))
    # a launcher's store outlives a process group, and the next one must not read what the last has left
    _opened += 1
    dist.init_process_group(
        backend, store=dist.PrefixStore(f"torch/{_opened}", store), rank=world.rank, world_size=world.size, timeout=timeout
    )
    _current = Group(world, backend, device, dist.PrefixStore(f"parwrap/{_opened}", store), waiting)
    try:
        yield _current
    finally:
        _current = None
        if dist.is_initialized():
            dist.destroy_process_group()


def current() -> Group | None:
    """The process group that parwrap has started, if any."""
    return _current


@contextmanager
def alone() -> Iterator[None]:
    """While only this rank runs the block: nothing in it may wait for the others."""
    _alone.append(threading.get_ident())
    try:
        yield
    finally:
        _alone.pop()


def is_alone(here: bool = False) -> bool:
    """Whether only this rank runs what runs now; with ``here``, whether it does so in this very thread."""
    return bool(_alone) and (not here or threading.get_ident() in _alone)


def _world() -> World:
    group = open_group()
    return group.world if group else read_world(os.environ)


def rank() -> int:
    """This process among all ranks, from 0.

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
    """This process among the ranks of its node, from 0.

    >>> local_rank()
    0
    """
    return _world().local_rank


def is_rank_zero() -> bool:
    """Whether this is the rank that speaks and saves.

    >>> is_rank_zero()
    True
    """
    return rank() == 0


def open_group() -> Group | None:
    """The process group that parwrap or the user's own code has started, if any."""
    if _current is not None:
        return _current
    if not dist.is_initialized():
        return None
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return Group(World(dist.get_rank(), dist.get_world_size()), dist.get_backend(), device, store=None, timeout=PATIENCE)
