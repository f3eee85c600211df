"""One rank among any number, in one process: the others do the same as it does, and what it sends is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

from parwrap.ranks import group as groups
from parwrap.ranks.world import World

NAME = "counted"
sent: Counter[str] = Counter()
"""What the rank has sent: calls and bytes, of each kind."""


def _noted(kind: str, count: int) -> None:
    sent[f"{kind}: calls"] += 1
    sent[f"{kind}: bytes"] += count


class CountedGroup(dist.ProcessGroup):
    """The other ranks have the same tensors as this one."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._size = size

    def _done(self, kind: str, tensors: list[torch.Tensor], result: Any) -> Any:
        _noted(kind, sum(t.numel() * t.element_size() for t in tensors))
        future: Future = Future()
        future.set_result(result)
        return _create_work_from_future(future)

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        tensors = tensors if isinstance(tensors, list) else [tensors]
        if opts is None or opts.reduceOp == dist.ReduceOp.SUM:
            for each in tensors:
                each.mul_(self._size)
        return self._done("all-reduce", tensors, tensors)

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        return self._done("broadcast", tensors, tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for each in outputs[0]:
            each.copy_(inputs[0])
        return self._done("all-gather", outputs[0], outputs)

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def getBackendName(self) -> str:
        return NAME


class CountedStore(dist.Store):
    """A store that counts what is asked of it."""

    def __init__(self, *_: Any) -> None:
        super().__init__()
        self._store = dist.HashStore()

    def set(self, key: str, value: Any) -> None:
        _noted("store", len(value))
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        value = self._store.get(key)
        _noted("store", len(value))
        return value

    def add(self, key: str, number: int) -> int:
        _noted("store", 8)
        return self._store.add(key, number)

    def check(self, keys: list[str]) -> bool:
        _noted("store", sum(map(len, keys)))
        return self._store.check(keys)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        _noted("store", len(desired))
        return self._store.compare_set(key, expected, desired)

    def wait(self, keys: list[str], *_: Any) -> None:
        _noted("store", sum(map(len, keys)))

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)


if NAME not in dist.Backend.backend_list:
    dist.Backend.register_backend(NAME, lambda store, rank, size, timeout: CountedGroup(rank, size), devices=["cpu"])


@contextmanager
def one_of(size: int) -> Iterator[groups.Group]:
    """Rank 0 of ``size`` inside the block, alone on its node; the counts begin at zero."""
    sent.clear()
    world = World(0, size, 0, 1, 0, "torchrun", f"parwrap://job/one-of-{size}")
    new_group = dist.new_group
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "FileStore", CountedStore)
        patch.setattr(dist, "new_group", lambda **options: new_group(**{**options, "backend": NAME}))
        with groups.opened(world, backend=NAME) as group:
            assert group is not None
            yield group
