"""Local SGD: each rank steps on its own gradients, and every few steps the weights are averaged over the ranks.

After Stich (2018); with synchronous steps first, after Lin et al. (2018), and with an outer optimizer, after Douillard et al. (2023). It
intercepts the calls with which a loop trains and evaluates. The synchronous steps are those of the DDP strategy; ``local_steps.py`` counts
local steps.
"""

from __future__ import annotations

import io
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parwrap.coordination.call_site import location, warn, worth_a_look
from parwrap.errors import UsageError
from parwrap.group.group import Group, is_alone
from parwrap.intercept.backward import Backward
from parwrap.intercept.clipping import Clip
from parwrap.intercept.interceptor import intercepts
from parwrap.intercept.scaler import ScalerCall
from parwrap.intercept.skipping import stepping
from parwrap.loop.autograd_graph import reached
from parwrap.loop.loop_state import Loop, parameters_of
from parwrap.options import Options
from parwrap.strategies.common.agreement import checksums
from parwrap.strategies.common.equal_state import EqualState
from parwrap.strategies.common.strategy import Strategy
from parwrap.strategies.ddp.bypasses import Bypasses
from parwrap.strategies.ddp.ddp import DDP
from parwrap.strategies.local_sgd.local_steps import LocalSteps
from parwrap.torch_private.autograd import NO_GRAPH_TASK, current_graph_task_id

__all__ = ["LocalSGD"]

TRAINED = "whether it has trained"


class LocalSGD(Strategy):
    """Averages weights every few steps of each optimizer, and whenever all ranks must hold the same weights."""

    OPTIONS = ("every", "warmup", "outer", "outer_lr", "outer_momentum", *DDP.OPTIONS)

    def __init__(self, group: Group, loop: Loop, options: Callable[[], Options]) -> None:
        super().__init__(group, loop, options)
        self._ddp = DDP(group, loop, options)
        self._ddp.share = lambda: self.share()
        self._equal_state = EqualState(group, loop)
        self._bypasses = Bypasses(group, loop)
        self._steps, self._by_hand = LocalSteps(group, loop, options), _ChangedByHand(loop)
        self._taken: dict[int, int] = {}
        self._warming = options().warmup > 0
        self._running = self._stepped = self._warned = False
        self._weights: list[float] = []
        loop.looking = self._look

    @classmethod
    def check(cls, options: Options) -> None:
        for name in DDP.OPTIONS:
            if not options.warmup and (value := getattr(options, name)) != getattr(Options, name):
                raise UsageError(
                    f"{name}={value!r} applies only to averaged gradients, which strategy='local_sgd' has only during its warm-up: "
                    "remove it, or set warmup= to a number of steps."
                )
        if not options.outer:
            for name in ("outer_lr", "outer_momentum"):
                if (value := getattr(options, name)) != getattr(Options, name):
                    raise UsageError(f"{name}={value!r} is an option of the outer optimizer: add outer='nesterov', or remove it.")

    @property
    def averages_gradients(self) -> bool:
        return self._warming

    def described(self) -> str:
        options = self._options()
        first = f" after {options.warmup} synchronous" if options.warmup else ""
        outer = f", outer {options.outer} lr {options.outer_lr:g} momentum {options.outer_momentum:g}" if options.outer else ""
        return f"local_sgd, weights averaged every {options.every} steps{first}{outer}"

    @intercepts
    def backward(self, call: Backward) -> None:
        """Run ``call``; gradients stay this rank's own unless steps are synchronous."""
        if self._warming:
            self._ddp.backward(call)
            return
        if self._running or is_alone():
            call.run()
            return
        self._running = True
        try:
            if self._by_hand.due:
                self._by_hand.look(reached(call.roots))
            self._run(call)
        finally:
            self._running = False
        self._loop.ran_backward()

    @intercepts
    def move(self, module: nn.Module, apply: Callable[[], nn.Module]) -> nn.Module:
        """Move or cast the parameters of ``module``."""
        return self._ddp.move(module, apply)

    @intercepts
    def data_parallel(self, instance: nn.DataParallel, module: nn.Module, build: Callable[[Any], None]) -> None:
        """Build an ``nn.DataParallel`` that uses only this rank's device."""
        self._bypasses.data_parallel(instance, module, build)

    @intercepts
    def takes_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Prepare a step of ``optimizer``.

        Raises:
            UsageError: a backward is running, which would continue with averaged weights.
        """
        if is_alone() or self._loop.is_of_one_batch(optimizer):
            return
        if current_graph_task_id() != NO_GRAPH_TASK:
            raise UsageError(
                f"{type(optimizer).__name__}.step() at {location()} runs inside a backward pass, for example in a hook of "
                "register_post_accumulate_grad_hook. Ranks average weights after a step, and weights must not change during a backward "
                "pass. Call step() after loss.backward()."
            )
        number = self._number(optimizer)
        if self._warming:
            self._ddp.unaveraged.takes_step(optimizer)
        elif not _is_part(optimizer):
            self._steps.begin(number, optimizer)

    @intercepts
    def took_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step of ``optimizer``, and average the weights once it has taken ``every`` steps."""
        if is_alone() or _is_part(optimizer) or self._loop.is_of_one_batch(optimizer):
            return
        if self._warming:
            self._ddp.took_step(optimizer)
        number = self._number(optimizer)
        if number not in self._taken:  # it continues the count of an optimizer with the same parameters
            self._taken[number] = max((self._taken.get(each, 0) for each in self._loop.sharing(optimizer)), default=0)
        self._taken[number] += 1
        self._stepped = True
        if not self._warming:
            self._steps.count(number, fmean(self._weights) if self._weights else 1.0)
        elif self._taken[number] >= self._options().warmup:
            self._warming = False
            self._ddp.close()

    @intercepts
    def closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure to run: its loss is this rank's own, like the steps that it controls, unless steps are synchronous."""
        return self._equal_state.closure(self._ddp.unaveraged.closure(closure)) if self._warming else closure

    @intercepts
    def clip(self, clip: Clip) -> Any:
        """Clip this rank's own gradients, or their mean if steps are synchronous."""
        return self._ddp.unaveraged.clip(clip) if self._warming else clip.run()

    @intercepts
    def use_scaler(self, call: ScalerCall) -> Any:
        """Run a call of the script's own scaler, which checks the gradients that the step uses."""
        return self._ddp.unaveraged.use_scaler(call) if self._warming else call.run()

    def averaged(self) -> AbstractContextManager[None]:
        return self._ddp.averaged()

    @intercepts
    def metric(self, metric: Any) -> Any:
        """The mean over ranks of the metric of ``ReduceLROnPlateau``."""
        return self._equal_state.metric(metric)

    def _look(self) -> None:
        self._steps.average()
        self._equal_state.evaluation_begins()

    @intercepts
    def set_mode(self, module: nn.Module, training: bool) -> None:
        """Give all ranks the same weights and rank 0's buffers when a root is set to eval."""
        if not training and not is_alone() and self._loop.evaluated_with(module):
            self._steps.average()
        self._equal_state.set_mode(module, training)

    @intercepts
    def save(self, f: Any, write: Callable[[Any], None]) -> None:
        """Save the weights as they are, because saving never communicates; warn if they are rank 0's own."""
        if self._steps.own and self._group.world.rank == 0 and not (self._warned or is_alone() or isinstance(f, io.BytesIO)):
            self._warned = True
            warn(
                f"parwrap: torch.save at {location()} is called {self._steps.own} step(s) after the ranks last averaged their weights: "
                "if it saves weights, they are rank 0's own. Call model.eval() first, which averages them. This is shown once."
            )
        write(f)

    def leave(self, returns: bool) -> None:
        """Average the weights for the last time, once all ranks have reached the end together."""
        if not any(self._group.share(TRAINED, self._loop.backwards or len(self._taken), range(self._group.world.size)).values()):
            return
        self._steps.average_at_end()
        if not self._loop.backwards:
            self._loop.ran_backward()  # other ranks have run one
        self._ddp.leave(returns)
        if not self._taken:
            warn(
                "parwrap: no optimizer of torch.optim has stepped, but strategy='local_sgd' averages only the parameters of optimizers "
                "that step: each rank trained separately, if at all. To average gradients in every backward pass, use strategy='ddp'."
            )

    def close(self) -> None:
        self._ddp.close()

    def _run(self, call: Backward) -> None:
        if self._stepped:
            self._weights.clear()
            self._stepped = False
        batch = self._loop.weights.find(call.tensors) if call.weight is None else self._loop.weights.current
        weight = batch.weight if call.weight is None else call.weight
        if call.weight is not None:
            self._weights = [weight]  # of all losses added up for this backward
            call.run()
            if weight not in (0.0, 1.0):
                _divide([*reached(call.roots), *call.existing_grads], weight)
            return
        self._weights.append(weight)
        # a sample of weight 0 must not contribute to the gradients
        factor = batch.loss_factor if weight else 0.0
        (call.scaled(factor) if call.averaged and factor != 1.0 else call).run()

    def _number(self, optimizer: torch.optim.Optimizer) -> int:
        """The number of ``optimizer`` on all ranks; a copy of one gets a number at its first step."""
        number = self._loop.number(optimizer)
        return self._loop.register(optimizer) if number is None else number

    def phase(self) -> int:
        return self._loop.generation

    def take_state(self, source: int) -> None:
        """Make ranks that have missed something continue from rank ``source``; the others keep their local progress."""
        takes = self._group.coordinator.stale
        self._ddp.take_state(source, takes)
        received = [(self._taken, self._warming, self._steps.state()) if self._group.world.rank == source else None]
        dist.broadcast_object_list(received, source)
        if takes and received[0] is not None:
            self._taken, self._warming, steps = received[0]
            self._steps.load(steps)


def _is_part(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step is part of an outer optimizer's step of the same parameters, as in Lookahead; only the outer step counts."""
    around = [each for each in stepping() if each is not optimizer]
    return any({id(p) for p in parameters_of(optimizer)} <= {id(p) for p in parameters_of(each)} for each in around)


def _divide(leaves: list[torch.Tensor], weight: float) -> None:
    """Divide gradients by ``weight``, with which the losses were multiplied, to get this rank's mean gradient."""
    for grad in {id(leaf): leaf.grad for leaf in leaves if leaf.grad is not None}.values():
        grad.div_(weight)


class _ChangedByHand:
    """Warns of weights that change without an optimizer: checks, less and less often, leaves that no optimizer owns.

    Args:
        loop: the loop state, which knows the optimizers and the batch.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._visits = 0
        self._warned = False
        self._seen: dict[int, tuple[weakref.ref[torch.Tensor], int, int]] = {}

    @property
    def due(self) -> bool:
        """Whether to check the next backward."""
        self._visits += 1
        return not self._warned and worth_a_look(self._visits) and not self._loop.evaluations

    def look(self, leaves: Iterable[torch.Tensor]) -> None:
        """Warn if one of the ``leaves`` that a backward reaches has been trained since an earlier one; ignore inputs of one batch."""
        owned = {id(p) for p in self._loop.once_owned().values()}
        for leaf in leaves:
            known, batch, before = self._seen.get(id(leaf), (None, 0, 0))
            if id(leaf) in owned:
                continue
            if known is None or known() is not leaf:
                self._seen[id(leaf)] = weakref.ref(leaf), self._loop.batches, checksums([leaf])[0]
            elif (isinstance(leaf, nn.Parameter) or self._loop.batches > batch) and checksums([leaf])[0] != before:
                self._warn(leaf)
                return

    def _warn(self, leaf: torch.Tensor) -> None:
        self._warned = True
        warn(
            f"parwrap: a parameter of shape {tuple(leaf.shape)} that no optimizer owns changed between two backward passes. "
            "strategy='local_sgd' averages only the parameters of optimizers, so each rank continues with a different value. Pass it to "
            "an optimizer of torch.optim, or choose strategy='ddp'. This is shown once."
        )
