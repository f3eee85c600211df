"""Hogwild: every rank steps separately, on parameters in memory that all ranks of the node share.

Nothing is averaged and no step waits for another, unless ``lock=True`` makes ranks take turns. Each rank has its own buffers, gradients and
optimizer state. ``shared_parameters.py`` puts the parameters into shared memory.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from parwrap.coordination.call_site import location, worth_a_look
from parwrap.errors import UsageError
from parwrap.group.group import Group, is_alone
from parwrap.intercept.backward import Backward
from parwrap.intercept.interceptor import Interceptor, intercepts
from parwrap.intercept.skipping import steps_running
from parwrap.loop.loop_state import Loop
from parwrap.options import Options
from parwrap.strategies.common.equal_state import EqualState
from parwrap.strategies.common.strategy import Strategy
from parwrap.strategies.hogwild.shared_parameters import SharedParameters
from parwrap.system.shared_memory import shared_file, shared_memory

__all__ = ["Hogwild"]

GOING_ON = "training after an evaluation"

LINE = 8
"""The distance between the ranks' counters, in numbers, so that they are in separate cache lines."""


class Hogwild(Strategy):
    """Every rank steps separately, on parameters that all ranks share."""

    OPTIONS = ("lock",)
    steps_together = False

    def __init__(self, group: Group, loop: Loop, options: Callable[[], Options]) -> None:
        super().__init__(group, loop, options)
        self._parameters = SharedParameters(group)
        self._generation, self._backwards = -1, 0
        # opened here, where all ranks take part
        self._lock = Lock(group) if options().lock else None
        self._progress = Progress(group)

    @classmethod
    def check(cls, options: Options) -> None:
        for name, default in (("batch", "per_rank"), ("lr", "keep"), ("loss", "mean")):
            if (value := getattr(options, name)) != default:
                raise UsageError(
                    f"{name}={value!r} says how ranks share a step, but with strategy='hogwild' each rank steps on its own: remove one "
                    "of them."
                )
        if options.uneven == "join":
            raise UsageError(
                "uneven='join' weights ranks by their samples in a shared step, but with strategy='hogwild' each rank steps on its own: "
                "choose 'pad' or 'drop'."
            )

    @classmethod
    def joining(cls, group: Group | None, options: Options) -> AbstractContextManager[Group | None]:
        if group is not None and group.world.local_size < group.world.size:
            raise UsageError(
                f"strategy='hogwild' shares the memory of one node, but the {group.world.size} ranks are on several nodes: start them on "
                "one node, or choose another strategy."
            )
        if group is not None and group.device.type != "cpu":
            raise UsageError(
                f"strategy='hogwild' shares CPU memory, but this rank trains on {group.device}: set CUDA_VISIBLE_DEVICES to an empty "
                "value to train on the CPU, or choose another strategy."
            )
        return super().joining(group, options)

    def interceptors(self) -> list[Interceptor]:
        return [self, Evaluations(self._group, self._loop), *([self._lock] if self._lock else [])]

    @intercepts
    def backward(self, call: Backward) -> None:
        """Share new parameters of optimizers, then run ``call``."""
        if is_alone():
            call.run()
            return
        self._loop.look_for_parameters()
        self._backwards += 1
        shared = self._parameters.put_back()
        if not shared or self._generation != self._loop.generation or worth_a_look(self._backwards):
            self._share()
        call.run()
        self._loop.ran_backward()

    @intercepts
    def stepped(self, optimizer: Optimizer) -> None:
        """Move parameters back into shared memory, because some steps replace their tensors, and count the step."""
        self._parameters.put_back()
        self._progress.step()

    @intercepts
    def set_mode(self, module: nn.Module, training: bool) -> None:
        """Move parameters back into shared memory when ``module.train(training)`` is called, for a common evaluation."""
        self._parameters.put_back()

    def described(self) -> str:
        return "hogwild on shared parameters" + (", a lock around each step" if self._lock else "")

    def phase(self) -> int:
        return self._loop.generation

    def others_progress(self) -> bool:
        return self._progress.of_others()

    def close(self) -> None:
        self._parameters.close()
        if self._lock:
            self._lock.close()

    def _share(self) -> None:
        """Share parameters at a backward and not when an optimizer takes them, because by then every rank has initialized them."""
        owned = self._loop.once_owned()
        if not owned:
            raise UsageError(
                f"strategy='hogwild' shares the parameters of optimizers, but there is none at the backward pass at {location()}: build "
                "the optimizer first. For manual updates, choose another strategy."
            )
        if not self._parameters.holds(owned.values()):
            with self._lock.let_go() if self._lock else nullcontext():  # a closure's backward runs inside a step
                self._parameters.share(owned)
        self._generation = self._loop.generation


class Evaluations(Interceptor):
    """Makes ranks evaluate the same model: they synchronize before and after an evaluation, so that no rank trains during it.

    Buffers become rank 0's, as in DDP, and schedulers use the mean of the ranks' metrics.
    """

    def __init__(self, group: Group, loop: Loop) -> None:
        self._group, self._loop = group, loop
        self._equal_state = EqualState(group, loop)
        self._trained, self._evaluating = 0, False
        group.coordinator.answer(GOING_ON, lambda detail, present: None)

    @intercepts
    def set_mode(self, module: nn.Module, training: bool) -> None:
        """Synchronize the ranks when ``module.train(training)`` begins or ends an evaluation."""
        if is_alone() or not (self._loop.is_root(module) if training else self._loop.evaluated_with(module)):
            return
        if not training:
            self._evaluating |= self._loop.backwards > self._trained
            self._trained = self._loop.backwards
            self._equal_state.set_mode(module, training)
        elif self._evaluating:
            self._evaluating = False
            self._group.synchronize(GOING_ON)

    @intercepts
    def metric(self, metric: Any) -> Any:
        """The mean of ``metric`` over the ranks."""
        return self._equal_state.metric(metric)


class Lock(Interceptor):
    """Lets one rank at a time take a step; a rank that ends, in whatever way, releases the lock.

    Args:
        group: the ranks.
    """

    def __init__(self, group: Group) -> None:
        store = dist.PrefixStore(f"lock/{group.coordinator.part}", group.store)
        self._file = shared_file(store, group.world.rank, range(group.world.size), 1)

    @intercepts
    def step(self, optimizer: Optimizer) -> None:
        """Take the lock before a step, unless it is part of another step, which holds the lock already."""
        if steps_running() == 1:
            fcntl.lockf(self._file, fcntl.LOCK_EX)

    @intercepts
    def stepped(self, optimizer: Optimizer) -> None:
        """Release the lock after a step; if a step raises, the next step releases the lock."""
        if steps_running() == 1:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    @contextmanager
    def let_go(self) -> Iterator[None]:
        """Release the lock inside the block; if a step is running, take the lock again afterwards."""
        fcntl.lockf(self._file, fcntl.LOCK_UN)
        yield
        if steps_running():
            fcntl.lockf(self._file, fcntl.LOCK_EX)

    def close(self) -> None:
        """Close the file of the lock, which releases it."""
        os.close(self._file)


class Progress:
    """Tracks the number of steps of each rank.

    Args:
        group: the ranks.
    """

    def __init__(self, group: Group) -> None:
        store, size = dist.PrefixStore(f"progress/{group.coordinator.part}", group.store), group.world.size
        self._steps = memoryview(shared_memory(store, group.world.rank, range(size), size * LINE * 8)).cast("q")
        self._mine, self._seen, self._since = group.world.rank * LINE, b"", 0.0
        self._timeout = group.timeout.total_seconds()

    def step(self) -> None:
        """Count a step of this rank."""
        self._steps[self._mine] += 1

    def of_others(self) -> bool:
        """Whether other ranks have taken a step within the timeout, measured from the call that first sees it."""
        now = bytes(self._steps)
        if now != self._seen:
            self._seen, self._since = now, time.monotonic()
        return time.monotonic() < self._since + self._timeout
