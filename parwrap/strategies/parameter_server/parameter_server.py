"""Parameter servers: some ranks hold the parameters and take the steps, the others compute gradients and push them.

This is the strategy of a worker, which runs its own backward passes and leaves steps to the servers. ``server.py`` is the server,
``roles.py`` assigns the roles and connects them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from statistics import fmean
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from parwrap.coordination.call_site import location, warn
from parwrap.errors import UsageError
from parwrap.group.group import Group, is_alone
from parwrap.intercept.backward import Backward
from parwrap.intercept.clipping import Clip
from parwrap.intercept.interceptor import Interceptor, intercepts
from parwrap.loop.loop_state import Loop
from parwrap.options import Options
from parwrap.strategies.common.equal_state import EVALUATION, METRIC, EqualState
from parwrap.strategies.common.strategy import Strategy
from parwrap.strategies.parameter_server.roles import joined, roles_of
from parwrap.strategies.parameter_server.server import Server
from parwrap.strategies.parameter_server.worker import Worker

__all__ = ["ParameterServer"]


class ParameterServer(Strategy):
    """The strategy of a worker of parameter servers.

    Args:
        group: the workers.
        loop: what the training loop has done so far.
        options: the options of the innermost running function.
    """

    OPTIONS = ("servers", "staleness", "survive")

    hands_over = True

    def __init__(self, group: Group, loop: Loop, options: Callable[[], Options]) -> None:
        super().__init__(group, loop, options)
        self._roles = roles_of(group, options().servers)
        self._pushing = Worker(self._roles, group, loop, lambda: options().lr_factor(group.world.size))
        self._weights: list[float] = []
        self._weight = 1.0
        self._result: Any = None
        self._warned = False
        self.steps_together = options().staleness == 0

    @classmethod
    def check(cls, options: Options) -> None:
        if options.staleness == 0:
            return
        for name, value in (("batch", "global"), ("uneven", "join"), ("lr", "linear"), ("lr", "sqrt")):
            if getattr(options, name) == value:
                raise UsageError(
                    f"{name}={value!r} applies to a batch that all ranks share, but workers of a parameter server step separately: "
                    "remove it, or set staleness=0 to make them step together."
                )

    @classmethod
    def joining(cls, group: Group | None, options: Options) -> AbstractContextManager[Group | None]:
        return joined(group, options)

    @classmethod
    def outside_loop(cls, group: Group, options: Options, loop: Loop) -> Server:
        """The server on a rank that does not run the training loop; ``group`` has all ranks."""
        return Server(roles_of(group, options.servers), options.staleness, loop)

    @property
    def averages_gradients(self) -> bool:
        return False

    def interceptors(self) -> list[Interceptor]:
        return [self, _AtEvaluation(self._group, self._loop, self._pushing)]

    def check_feature(self, name: str) -> None:
        if name == "sync_bn" and not self.steps_together:
            raise UsageError(
                "parwrap.sync_bn needs a shared batch: each worker of a parameter server steps on its own. Remove it, or set staleness=0 "
                "to make the workers step together."
            )
        if name == "amp with a loss scale":
            self._refuse_scaling("parwrap.amp in fp16")
        options = self._options()
        if name == "accumulate" and (options.batch == "global" or options.uneven == "join"):
            raise UsageError(
                "parwrap.accumulate and a parameter server do not work together with batch='global' or uneven='join', because a worker's "
                "part of a window would need a weight: remove one of them."
            )

    @intercepts
    def backward(self, call: Backward) -> None:
        """Run ``call``; its gradients stay this worker's own."""
        tensors = call.tensors
        if call.averaged and call.weight is None and not is_alone():
            weight, loss_factor, *_ = self._loop.weights.find(tensors)
            self._weights.append(weight)
            scale = weight * loss_factor
            call = call.scaled(scale) if scale != 1.0 and self.steps_together else call
        if not is_alone():
            self._pushing.begin()
        call.run()
        self._loop.ran_backward()

    @intercepts
    def scale_by_hand(self, scaler: torch.amp.GradScaler) -> None:
        """Refuse a scaled loss if workers step together, whether the scaler is the script's own or that of ``amp``."""
        if scaler.is_enabled() and not is_alone():
            self._refuse_scaling(f"a loss scale (GradScaler at {location()})")

    @intercepts
    def refuse_closure(self) -> None:
        """Refuse a closure, because it computes gradients inside a step, which a server takes."""
        if is_alone():
            return
        raise UsageError(
            f"optimizer.step(closure) at {location()} cannot run on a parameter server: the closure computes gradients on the worker "
            "during the step, but the server takes the step. Call backward() and then step() without a closure, or choose another "
            "strategy."
        )

    @intercepts
    def clip(self, clip: Clip) -> Any:
        """Clip this worker's own gradients; with ``staleness=0``, warn once that this differs from one process."""
        if self.steps_together and not (self._warned or is_alone()):
            self._warned = True
            warn(
                f"parwrap: at {location()}, each worker clips its own gradients, and the server then averages them. DDP and a single "
                "process clip the average instead, so the numbers differ. For the same numbers, choose strategy='ddp' or 'zero1'. This "
                "is shown once."
            )
        return clip.run()

    def _refuse_scaling(self, what: str) -> None:
        if self.steps_together:
            raise UsageError(
                f"{what} skips steps where gradients overflow, on one worker but not on the others. With staleness=0, the others would "
                "wait for it, or match their later steps with its earlier ones: compute in bf16, which needs no loss scale, or set "
                "another staleness."
            )

    @intercepts
    def skips(self, optimizer: Optimizer) -> bool:
        """Let the servers take the step with this worker's gradients, and copy the new values; return whether they did."""
        if is_alone() or self._loop.is_of_one_batch(optimizer):
            return False
        if self._weights:
            self._weight, self._weights = fmean(self._weights), []
        self._pushing.push(optimizer, self._weight if self.steps_together else 1.0)
        return True

    @intercepts
    def optimizer_state(self, optimizer: Optimizer, save: Callable[[], Any]) -> Any:
        """Save the state of ``optimizer`` as the servers have it."""
        with self._pushing.with_state(optimizer):
            return save()

    @intercepts
    def load_optimizer_state(self, optimizer: Optimizer, load: Callable[[Any], None], state: Any) -> None:
        """Load ``state``, on the servers too."""
        load(state)
        self._pushing.load(optimizer)

    @intercepts
    def move(self, module: nn.Module, apply: Callable[[], nn.Module]) -> nn.Module:
        """Move ``module``; refuse to cast parameters that servers hold."""
        before = {id(p): p.dtype for p in module.parameters() if self._pushing.holds(p)}
        moved = apply()
        if any(p.dtype != before.get(id(p), p.dtype) for p in moved.parameters()):
            raise UsageError(
                f"{location()} casts parameters that a parameter server holds, but they would keep their dtype on the server: cast the "
                "model before its first backward pass, or choose another strategy."
            )
        self._loop.moved()
        return moved

    def described(self) -> str:
        options = self._options()
        pace = {None: "each at its own pace", 0: "in step"}.get(options.staleness, f"at most {options.staleness} steps ahead")
        servers = f"{options.servers} parameter server" + ("s" if options.servers > 1 else "")
        return f"plus {servers}, workers {pace}"

    def returned(self, result: Any) -> None:
        """Keep the ``result`` of the function, because the servers return it too."""
        self._result = result

    def phase(self) -> int:
        return self._loop.generation

    def set_waiting(self, waiting: bool, step: int = 0) -> None:
        self._pushing.set_waiting(waiting, step)

    def lost(self) -> Collection[int]:
        return self._roles.lost()

    def leave(self, returns: bool) -> None:
        self._pushing.end(self._result)

    def failed(self, error: BaseException) -> None:
        """Notify the servers that this worker has failed."""
        self._pushing.failed(error)

    def close(self) -> None:
        self._pushing.close()
        self._result = None


class _AtEvaluation(EqualState):
    """Makes workers evaluate the same model, that of the lowest rank present, and use the mean of their metrics.

    The model is sent through a server and metrics through the store, because a collective would fail with a dead worker.

    Args:
        group: the workers.
        loop: what the training loop has done so far.
        pushing: the connection to the servers.
    """

    def __init__(self, group: Group, loop: Loop, pushing: Worker) -> None:
        super().__init__(group, loop)
        self._pushing = pushing
        group.coordinator.answer(EVALUATION, lambda detail, present: None)
        group.coordinator.answer(METRIC, lambda detail, present: None)

    @intercepts
    def closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        return closure

    @intercepts
    def metric(self, metric: Any) -> Any:
        """The mean of ``metric`` over the workers present, so that their learning rates stay equal."""
        if is_alone():
            return metric
        metrics = self._group.exchange(METRIC, float(metric))
        return sum(metrics.values()) / len(metrics)

    @intercepts
    def set_mode(self, module: nn.Module, training: bool) -> None:
        """Copy the lowest rank's parameters and buffers into a root that is set to eval after training."""
        modules = [] if training or is_alone() else self._loop.evaluated_with(module)
        if all(self._synced.get(each, (0, 0)) == self._seen() for each in modules):
            return
        for each in modules:
            self._synced[each] = self._seen()
        source = min(self._group.synchronize(EVALUATION))
        held = (tensor for each in modules for tensor in (*each.parameters(), *each.buffers()))
        tensors = [tensor for tensor in held if tensor.layout == torch.strided]
        topic = self._group.key(EVALUATION)
        if self._group.world.rank == source:
            self._pushing.pull()
            self._pushing.give(topic, [tensor.detach().cpu() for tensor in tensors])
            return
        with torch.no_grad():
            for tensor, value in zip(tensors, self._pushing.get(topic), strict=True):
                tensor.data.copy_(value)
        self._pushing.taken_over()
