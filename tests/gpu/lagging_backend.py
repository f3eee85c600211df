"""A process group that behaves as NCCL's does to the host, over gloo, so that it runs without a GPU.

A collective returns at once and is carried out later, in order, by a thread: what reads its result, or changes what it sends, before it
waits, computes something else. Before each one the ranks compare what they are about to do; NCCL would hang, or mix up numbers.
``shutdown`` waits for what is under way, as ``ncclCommFinalize`` does, and ``abort`` does not. Torch's functional collectives, and so
``fsdp``, take no process group that is written in Python.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

from parwrap.api import gather_with_grad
from parwrap.batch_norm import statistics_exchange
from parwrap.group import group as groups
from parwrap.strategies.ddp import gradient_averager

NAME = "lagging"
SHORTEST, LONGEST = 0.0005, 0.004
"""Seconds that a collective is late."""


class DifferentCollectivesError(RuntimeError):
    """The ranks are about to take part in different collectives."""


class Lagging(dist.ProcessGroup):
    """Carries out collectives over gloo, late.

    Attributes:
        posted: what this rank has posted: kind, numbers of elements and dtypes.
        failed: the error of the first collective that could not be carried out; nothing is sent after it.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("late", store), rank, size, timeout)
        self._compared = dist.ProcessGroupGloo(dist.PrefixStore("compared", store), rank, size, timeout)
        self._size, self._late = size, random.Random(rank)
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._aborted = threading.Event()
        self.posted: list[str] = []
        self.failed: Exception | None = None
        self._thread = threading.Thread(target=self._carry_out, daemon=True)
        self._thread.start()

    def _carry_out(self) -> None:
        while (task := self._queue.get()) is not None:
            what, start, result, future = task
            time.sleep(self._late.uniform(SHORTEST, LONGEST))
            try:
                if self.failed is None:
                    self._compare(what)
                    start().wait()
            except Exception as error:  # torch's reducer crashes at a future that has one
                self.failed = error
            future.set_result(result)

    def _compare(self, what: str) -> None:
        mine = torch.tensor([int.from_bytes(hashlib.sha256(what.encode()).digest()[:7], "big")])
        all_of_them = [torch.empty_like(mine) for _ in range(self._size)]
        self._compared.allgather([all_of_them], [mine]).wait()
        if any(each != mine for each in all_of_them):
            raise DifferentCollectivesError(f"rank {self.rank()} takes part in {what}, and another rank in something else: {self.posted}")

    def _post(self, kind: str, tensors: list[torch.Tensor], start: Callable[[], Any], result: Any) -> Any:
        what = f"{kind} of {', '.join(f'{t.numel()} {t.dtype} {t.layout}' for t in tensors)}"
        if self.failed is not None or self._aborted.is_set():
            raise self.failed or RuntimeError("the process group was aborted")
        self.posted.append(what)
        future: Future = Future()
        self._queue.put((what, start, result, future))
        return _create_work_from_future(future)

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        tensors = tensors if isinstance(tensors, list) else [tensors]
        opts = opts or dist.AllreduceOptions()
        return self._post("all-reduce", tensors, lambda: self._gloo.allreduce(tensors, opts), tensors)

    def allreduce_coalesced(self, tensors: Any, opts: Any) -> Any:
        return self._post("coalesced all-reduce", tensors, lambda: self._gloo.allreduce_coalesced(tensors, opts), tensors)

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        return self._post(f"broadcast of {opts.rootRank}", tensors, lambda: self._gloo.broadcast(tensors, opts), tensors)

    def reduce(self, tensors: Any, opts: Any) -> Any:
        return self._post(f"reduce to {opts.rootRank}", tensors, lambda: self._gloo.reduce(tensors, opts), tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts or dist.AllgatherOptions()
        return self._post("all-gather", inputs, lambda: self._gloo.allgather(outputs, inputs, opts), outputs)

    def all_gather_single(self, output: Any, given: Any, opts: Any = None) -> Any:
        opts = opts or dist.AllgatherOptions()
        return self._post("all-gather into one", [given], lambda: self._gloo._allgather_base(output, given, opts), output)

    _allgather_base = all_gather_single

    def reduce_scatter_single(self, output: Any, given: Any, opts: Any = None) -> Any:
        opts = opts or dist.ReduceScatterOptions()
        return self._post("reduce-scatter", [given], lambda: self._gloo._reduce_scatter_base(output, given, opts), output)

    _reduce_scatter_base = reduce_scatter_single

    def barrier(self, opts: Any = None) -> Any:
        return self.allreduce([torch.ones(1)])

    def shutdown(self) -> None:
        """Wait for all that is under way."""
        if not self._aborted.is_set():
            self._queue.put(None)
            self._thread.join()

    def abort(self) -> None:
        """Wait for nothing."""
        self._aborted.set()
        self._queue.put(None)

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def getBackendName(self) -> str:
        return NAME


def _opened(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Lagging:
    return Lagging(store, rank, size, timeout)


if NAME not in dist.Backend.backend_list:
    dist.Backend.register_backend(NAME, _opened, devices=["cpu", "cuda"])


class _OnTheWay:
    """A mock of pinned memory and an event of CUDA."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self._numbers = numbers.clone()

    def read(self) -> list[float]:
        return torch._C.TensorBase.tolist(self._numbers)  # on a GPU this waits for what was sent a step ago


@contextmanager
def as_on_gpus(folder: Any) -> Iterator[Lagging]:
    """The process group of the test replaced by one that parwrap takes for NCCL's; the CPU stands for the GPU: a mock."""
    before = groups.current()
    world = replace(before.world, init_method=(folder / "lagging").as_uri())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "torch_backend", lambda backend: NAME)
        patch.setattr(groups, "_current", None)
        patch.setattr(groups, "collective_count", lambda process_group: len(process_group.posted))
        for module in (statistics_exchange, gather_with_grad):
            patch.setattr(module, "new_group", lambda ranks, **options: dist.new_group(list(ranks), backend=NAME))
        barrier = dist.barrier
        patch.setattr(dist, "barrier", lambda device_ids: barrier())  # the CPU is none of several devices
        dist.distributed_c10d._update_default_pg(None)
        patch.setattr(gradient_averager, "_OnTheWay", _OnTheWay)
        patch.setattr(gradient_averager.GradientAverager, "_is_read_later", lambda averager: not averager.at_once)
        with groups.opened(world, backend="nccl") as group:
            group.coordinator.immediate = False  # what ranks report is known a step later
            process_group = dist.group.WORLD
            yield process_group
            if process_group.failed is not None:
                raise process_group.failed
