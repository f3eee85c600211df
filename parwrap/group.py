"""The process group of a :class:`World`, and the collectives that users call.

Only this file starts and stops a process group. Collectives take tensors, numbers and nested dicts, lists and tuples of
them, and mean the obvious thing on one rank without a launcher. Which gradients are averaged when is left to strategies.
"""

from __future__ import annotations

import os
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from numbers import Number
from typing import Any

import torch
import torch.distributed as dist

from parwrap.device import choose_backend, choose_device
from parwrap.errors import RankMismatchError, UsageError
from parwrap.world import World, read_world

__all__ = [
    "Group",
    "all_ranks",
    "alone",
    "any_rank",
    "barrier",
    "broadcast",
    "current",
    "gather",
    "is_alone",
    "is_rank_zero",
    "local_rank",
    "opened",
    "rank",
    "reduce_mean",
    "reduce_sum",
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

    def wait_for_any(self, keys: Sequence[str], owner: int, purpose: str) -> None:
        """Return when rank ``owner`` has stored one of ``keys``."""
        deadline = time.monotonic() + self.timeout.total_seconds()
        while not any(self.store.check([key]) for key in keys):
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
_alone = 0


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
    global _alone
    _alone += 1
    try:
        yield
    finally:
        _alone -= 1


def is_alone() -> bool:
    """Whether only this rank runs what runs now."""
    return _alone > 0


def _world() -> World:
    group = _current or _users_own()
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


def barrier() -> None:
    """Return when all ranks have called it."""
    if group := _collective("barrier"):
        dist.barrier(device_ids=[group.device.index] if group.backend == "nccl" else None)


def reduce_sum(x: Any) -> Any:
    """The sum of ``x`` over all ranks, on every rank.

    Args:
        x: a tensor (any shape, the same on every rank), a number, or a nested dict, list or tuple of these.

    Returns:
        The same structure with new tensors (detached, on the device and of the dtype they came in; bool counts as
        int64) and plain numbers.

    >>> reduce_sum({"correct": 31, "loss": torch.tensor([1.5])})
    {'correct': 31, 'loss': tensor([1.5000])}
    """
    return _reduce("reduce_sum", x, lambda total, size: total)


def reduce_mean(x: Any) -> Any:
    """The mean of ``x`` over all ranks, on every rank; every rank counts the same.

    Takes and returns what :func:`reduce_sum` does; the mean of integers is a float.

    >>> reduce_mean([2, 0.5])
    [2.0, 0.5]
    """
    return _reduce("reduce_mean", x, lambda total, size: total / size)


def gather(x: Any) -> list[Any]:
    """Every rank's ``x``, as a list in the order of ranks, on every rank.

    Args:
        x: anything that pickles; tensors may differ in shape between ranks and arrive detached, on this rank's device.

    >>> gather("here")
    ['here']
    """
    group = _collective("gather")
    if group is None:
        return [_map(x, _detached)]
    gathered: list[Any] = [None] * group.world.size
    dist.all_gather_object(gathered, _map(x, lambda leaf: leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf))
    return [_map(each, lambda leaf: leaf.to(group.device) if isinstance(leaf, torch.Tensor) else leaf) for each in gathered]


def broadcast(x: Any, src: int = 0) -> Any:
    """Rank ``src``'s ``x``, on every rank; what the others pass is not looked at.

    Args:
        x: anything that pickles; tensors arrive detached, on this rank's device.
        src: the rank whose ``x`` is taken.

    >>> broadcast({"lr": 0.1})
    {'lr': 0.1}
    """
    size = world_size()
    if not 0 <= src < size:
        raise UsageError(f"broadcast(src={src}) asks for a rank that is not there: ranks are 0 to {size - 1}.")
    group = _collective("broadcast")
    if group is None:
        return _map(x, _detached)
    box = [_map(x, lambda leaf: leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf) if group.world.rank == src else None]
    dist.broadcast_object_list(box, src)
    return _map(box[0], lambda leaf: leaf.to(group.device) if isinstance(leaf, torch.Tensor) else leaf)


def any_rank(flag: Any) -> bool:
    """Whether ``flag`` is true on at least one rank; the same answer on all.

    >>> any_rank(False)
    False
    """
    return reduce_sum(int(bool(flag))) > 0


def all_ranks(flag: Any) -> bool:
    """Whether ``flag`` is true on every rank; the same answer on all.

    >>> all_ranks(True)
    True
    """
    return reduce_sum(int(bool(flag))) == world_size()


def _collective(name: str) -> Group | None:
    """The group on which the collective ``name`` runs, or ``None`` where this rank is the only one."""
    group = _current or _users_own()
    if group is None:
        if read_world(os.environ).size > 1:
            raise UsageError(
                f"parwrap.{name}() needs the other ranks, and no process group is open here: "
                "call it inside a function decorated with @parwrap.distributed, or inside `with parwrap.distributed():`."
            )
        return None
    if _alone:
        raise UsageError(
            f"parwrap.{name}() would wait for ever: only this rank runs what @parwrap.rank_zero_only guards. "
            "Call it outside of that function."
        )
    return group


def _users_own() -> Group | None:
    """The process group that the user's code has started without parwrap, if any."""
    if not dist.is_initialized():
        return None
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return Group(World(dist.get_rank(), dist.get_world_size()), dist.get_backend(), device, store=None, timeout=PATIENCE)


def _map(x: Any, leaf: Callable[[Any], Any]) -> Any:
    """``x`` with ``leaf`` applied to whatever is not a dict, list or tuple."""
    if isinstance(x, dict):
        return (
            type(x)((key, _map(value, leaf)) for key, value in x.items())
            if type(x) is not dict
            else {k: _map(v, leaf) for k, v in x.items()}
        )
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*(_map(value, leaf) for value in x))
    if isinstance(x, (list, tuple)):
        return type(x)(_map(value, leaf) for value in x)
    return leaf(x)


def _detached(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _reduce(name: str, x: Any, finish: Callable[[Any, int], Any]) -> Any:
    group = _collective(name)
    leaves: list[torch.Tensor] = []
    _map(x, lambda leaf: leaves.append(_as_tensor(name, leaf)))
    size = 1
    if group is not None:
        size = group.world.size
        leaves = _all_reduced(leaves, group)
    totals = iter(leaves)

    def result(leaf: Any) -> Any:
        total = next(totals)
        if not isinstance(leaf, torch.Tensor):
            return finish(total.item(), size)
        finished = finish(total.to(leaf.device), size)
        return finished.to(leaf.dtype) if leaf.dtype.is_floating_point or leaf.dtype.is_complex else finished

    return _map(x, result)


def _as_tensor(name: str, leaf: Any) -> torch.Tensor:
    """A new tensor to sum ``leaf`` in: wide enough that a sum over many ranks does not lose what the leaf has."""
    if isinstance(leaf, torch.Tensor):
        wide = {torch.float16: torch.float32, torch.bfloat16: torch.float32}.get(leaf.dtype, leaf.dtype)
        return leaf.detach().to(wide if wide.is_floating_point or wide.is_complex else torch.int64, copy=True)
    if isinstance(leaf, Number):
        integral = isinstance(leaf, (bool, int)) or hasattr(leaf, "__index__")
        return torch.tensor(leaf, dtype=torch.int64 if integral else torch.float64)
    raise UsageError(f"parwrap.{name}() takes tensors, numbers and dicts, lists and tuples of them, not {type(leaf).__name__} ({leaf!r}).")


def _all_reduced(leaves: list[torch.Tensor], group: Group) -> list[torch.Tensor]:
    """The sums of ``leaves`` over the ranks, one collective for each dtype."""
    home = group.device if group.backend == "nccl" else torch.device("cpu")
    reduced = list(leaves)
    for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
        where = [index for index, leaf in enumerate(leaves) if leaf.dtype == dtype]
        flat = torch.cat([leaves[index].reshape(-1).to(home) for index in where])
        dist.all_reduce(flat)
        for index, part in zip(where, flat.split([leaves[index].numel() for index in where]), strict=True):
            reduced[index] = part.view(leaves[index].shape)
    return reduced
