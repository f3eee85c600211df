"""A process group that behaves as NCCL's does to the host, over gloo, and the CPU in the place of the GPU, so that both run anywhere.

A collective returns at once and is carried out later, in order, by a thread: what reads its result, or changes what it sends, before it
waits, computes something else. Before each one the ranks compare what they are about to do; NCCL would hang, or mix up numbers.
``shutdown`` waits for what is under way, as ``ncclCommFinalize`` does, and ``abort`` does not: results are garbage then, and whoever waits
for them goes on. The first collective connects the ranks, as ``ncclCommInitRank`` does, and waits there for all, abort or not.
"""

from __future__ import annotations

import hashlib
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future
from torch.utils._python_dispatch import _disable_current_modes

import parwrap
from parwrap.checks import same_weights, watchdog
from parwrap.ranks import device
from parwrap.ranks import group as groups
from parwrap.strategies import ddp_averager

NAME = "lagging"
GARBAGE = 1e6
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
        self._connecting: Any = dist.ProcessGroupGloo(dist.PrefixStore("connecting", store), rank, size, timeout)
        self._compared = dist.ProcessGroupGloo(dist.PrefixStore("compared", store), rank, size, timeout)
        self._size, self._late = size, random.Random(rank)
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._aborted = threading.Event()
        self._under_way: dict[Future, tuple[list[torch.Tensor], Any]] = {}
        self._ends = threading.Lock()
        self.posted: list[str] = []
        self.failed: Exception | None = None
        self._thread = threading.Thread(target=self._carry_out, daemon=True)
        self._thread.start()

    def _carry_out(self) -> None:
        while (task := self._queue.get()) is not None:
            what, start, future = task
            time.sleep(self._late.uniform(SHORTEST, LONGEST))
            try:
                if self.failed is None:
                    self._compare(what)
                    start().wait()
            except DifferentCollectivesError as error:  # torch's reducer crashes at a future that has one
                self.failed = error
            except RuntimeError as error:  # the other rank has ended, which NCCL does not notice
                self.failed = error
                self._aborted.wait()
                return
            self._end(future)

    def _end(self, future: Future, garbage: float | None = None) -> None:
        with self._ends:
            if future not in self._under_way:
                return
            tensors, result = self._under_way.pop(future)
        if garbage is not None:
            for tensor in tensors:
                tensor.fill_(garbage)
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
        if self._connecting is not None:
            connecting, self._connecting = self._connecting, None
            connecting.barrier().wait()
        future: Future = Future()
        self._under_way[future] = tensors, result
        self._queue.put((what, start, future))
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
        for future in list(self._under_way):
            self._end(future, GARBAGE)

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def getBackendName(self) -> str:
        return NAME


def _opened(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Lagging:
    return Lagging(store, rank, size, timeout)


if NAME not in dist.Backend.backend_list:
    dist.Backend.register_backend(NAME, _opened, devices=["cpu", "cuda"])


class Event:
    """A mock of CUDA's event: to wait for the newest one is to wait for all work of the device.

    Attributes:
        waits: the places where a host waited for its device.
    """

    def __init__(self, device: torch.device | None = None) -> None: ...

    recorded = 0
    waits: list[str] = []  # noqa: RUF012 one device

    def record(self) -> None:
        Event.recorded += 1
        self._number = Event.recorded

    def synchronize(self) -> None:
        if self._number == Event.recorded:
            frame = sys._getframe(1)
            Event.waits.append(f"Event.synchronize at {frame.f_code.co_filename}:{frame.f_lineno}")


class Stream:
    """A mock of CUDA's stream: each thread has a current one.

    Attributes:
        used: the streams that were current in a thread other than the main one.
    """

    used: list[Stream] = []  # noqa: RUF012 one device
    _of_thread = threading.local()

    @classmethod
    def current(cls, device: Any = None) -> Stream:
        return getattr(cls._of_thread, "stream", DEFAULT)

    def __enter__(self) -> None:
        self._before = Stream.current()
        Stream._of_thread.stream = self
        if threading.current_thread() is not threading.main_thread():
            Stream.used.append(self)

    def __exit__(self, *error: Any) -> None:
        Stream._of_thread.stream = self._before


DEFAULT = Stream()

pinned: list[torch.Tensor] = []
"""Tensors in pinned memory of the host, which may be read without the device."""


def _pinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*arguments: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if not pin_memory:
            return make(*arguments, **options)
        with _disable_current_modes():  # the operators inside are not those of the device
            pinned.append(make(*arguments, **options))
        return pinned[-1]

    return made


class _Cuda(ModuleType):
    """A mock of ``torch.cuda`` there."""

    Event = Event
    current_stream = Stream.current
    stream = staticmethod(lambda stream: stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _Torch(ModuleType):
    """A mock of the module ``torch`` on a machine with a GPU."""

    tensor = staticmethod(_pinned(torch.tensor))
    empty = staticmethod(_pinned(torch.empty))

    Event = Event

    cuda = _Cuda("cuda")

    @staticmethod
    def get_device_module(device: Any = None) -> Any:
        return _Torch.cuda

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


OURS = str(Path(parwrap.__file__).parent)


def _is_cuda(tensor: torch.Tensor) -> bool:
    """For parwrap, what is not in pinned memory is on the GPU; torch itself computes on the CPU."""
    return sys._getframe(1).f_code.co_filename.startswith(OURS) and not any(tensor is each for each in pinned)


def _is_cpu(tensor: torch.Tensor) -> bool:
    return not sys._getframe(1).f_code.co_filename.startswith(OURS) or any(tensor is each for each in pinned)


@contextmanager
def as_on_gpus() -> Iterator[Lagging]:
    """The process group of the test replaced by one that parwrap takes for NCCL's, and the CPU by what it takes for a GPU: a mock."""
    before = groups.current()
    assert before is not None
    world = replace(before.world, init_method=f"parwrap://job/lagging-{before.world.size}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "torch_backend", lambda backend: NAME)
        patch.setattr(groups, "_current", None)
        patch.setattr(watchdog, "abort_nccl", lambda: dist.group.WORLD.abort())
        for module in (ddp_averager, device, same_weights):
            patch.setattr(module, "torch", _Torch("torch"))
        patch.setattr(ddp_averager, "Future", lambda devices: Future())
        patch.setattr(torch.Tensor, "is_cuda", property(_is_cuda), raising=False)
        patch.setattr(torch.Tensor, "is_cpu", property(_is_cpu), raising=False)
        patch.setattr(Event, "recorded", 0)
        patch.setattr(Event, "waits", [])
        patch.setattr(Stream, "used", [])
        dist.distributed_c10d._update_default_pg(None)
        try:
            with groups.opened(world, backend="nccl"):
                process_group = dist.group.WORLD
                yield process_group
                if process_group.failed is not None:
                    raise process_group.failed
        finally:
            pinned.clear()
