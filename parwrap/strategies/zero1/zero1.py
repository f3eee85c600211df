"""ZeRO stage 1: gradients are averaged as in DDP, and each rank holds the optimizer's state for only a part of the parameters.

The optimizer stays the user's object, with all of its parameter groups. A rank steps the parameters whose state it holds, by hiding the
gradients of the others, and sends them to the other ranks. ``state_partition.py`` chooses them, and merges states. (Rajbhandari et al.,
2020, https://arxiv.org/abs/1910.02054; ``torch.distributed.optim.ZeroRedundancyOptimizer``.)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer

from parwrap.errors import RankMismatchError, UsageError
from parwrap.group.group import Group, is_alone
from parwrap.intercept.interceptor import Interceptor, intercepts
from parwrap.intercept.skipping import handed_on, has_inner, is_image
from parwrap.loop.loop_state import Loop
from parwrap.options import Options
from parwrap.strategies.ddp.ddp import DDP
from parwrap.strategies.zero1.state_partition import StatePartition
from parwrap.torch_private.optimizer import step_hooks

__all__ = ["Zero1"]


class Zero1(DDP):
    """DDP with sharded optimizer state."""

    def __init__(self, group: Group, loop: Loop, options: Callable[[], Options]) -> None:
        super().__init__(group, loop, options)
        self._shards: weakref.WeakKeyDictionary[Optimizer, StatePartition] = weakref.WeakKeyDictionary()
        self._held: dict[int, Optimizer] = {}
        self._former: set[int] = set()
        self._stepping: StatePartition | None = None
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._calls_closure = self._catches_up = False
        self._hooked: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def interceptors(self) -> list[Interceptor]:
        for optimizer in self._loop.optimizers():
            self.own_parameters(optimizer)
        return super().interceptors()

    @intercepts
    def own_parameters(self, optimizer: Optimizer) -> None:
        """Shard the state of an ``optimizer`` that is being built, or has got another group."""
        if isinstance(optimizer, LBFGS):
            raise UsageError(
                "LBFGS steps all parameters as one vector, so its state cannot be sharded: choose a strategy other than 'zero1', or "
                "another optimizer."
            )
        if optimizer not in self._shards and not (is_alone() or self._loop.is_of_one_batch(optimizer)):
            number = self._number(optimizer)
            self._shards[optimizer] = StatePartition(optimizer, self._group)
            self._coordinator.answer(_step(number), lambda detail, present: self._answer_step(number, present))
            self._coordinator.answer(_state(number), lambda detail, present: self._answer_state(number, present))
            self._former = set(self._held)

    @intercepts
    def takes_step(self, optimizer: Optimizer) -> None:
        """Synchronize with the other ranks, and skip the parameters whose state they hold."""
        self._hidden.clear()  # a step that raised never ended
        calls_closure, self._calls_closure = self._calls_closure, False
        if self._is_whole(optimizer):
            return
        number = self._number(optimizer)
        self.own_parameters(optimizer)  # done when it was built, unless it was of one batch then
        self._hold(number, optimizer)
        self._stepping = self._shards[optimizer]
        self._stepping.settle(self._group.synchronize(_step(number)))
        if not calls_closure:
            self._hide()
        self._exchange_before_hooks(optimizer)

    @intercepts
    def closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap ``closure``, so that it hides the gradients of parameters that other ranks step."""
        self._calls_closure = True

        def then_hide() -> Any:
            loss = closure()
            self._hide()
            return loss

        return then_hide

    @intercepts
    def took_step(self, optimizer: Optimizer) -> None:
        """Send the parameters stepped here, and receive those stepped elsewhere."""
        super().took_step(optimizer)
        self._exchange()

    def _exchange(self) -> None:
        if self._stepping is not None:
            self._show()
            self._stepping.send()
            self._stepping = None

    def _exchange_before_hooks(self, optimizer: Optimizer) -> None:
        """Exchange weights before the script's own hooks on ``optimizer``: these may read the weights, for example for a moving average."""
        _, hooks = step_hooks(optimizer)
        if not hooks or id(self) in hooks:
            return

        def exchange(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
            if not (is_image(args[0]) or handed_on(optimizer)):
                self._exchange()

        hooks[id(self)] = exchange
        hooks.move_to_end(id(self), last=False)
        self._hooked.add(optimizer)

    @intercepts
    def optimizer_state(self, optimizer: Optimizer, save: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The whole state, as in a single process, on every rank."""
        state = save()
        if has_inner(optimizer) or self._loop.is_of_one_batch(optimizer):
            return state
        if self._catches_up:
            return self._shards[optimizer].without(state)
        if is_alone():
            raise UsageError(
                f"{type(optimizer).__name__}.state_dict() needs all ranks with strategy='zero1', because each rank holds a part of the "
                "state. But only this rank runs a function decorated with @parwrap.rank_zero_only: call state_dict() outside of that "
                "function, and save its result there."
            )
        number = self._number(optimizer)
        self._shards[optimizer].settle(self._group.synchronize(_state(number)), hands_on=False)
        return self._shards[optimizer].whole(state)

    @intercepts
    def load_optimizer_state(self, optimizer: Optimizer, load: Callable[[dict[str, Any]], None], state: dict[str, Any]) -> None:
        """Load the part of a whole ``state`` that this rank holds."""
        if not self._is_whole(optimizer):
            self._number(optimizer)
            shards = self._shards[optimizer]
            state = shards.kept(state) if self._catches_up else shards.own(state)
        load(state)

    def leave(self, returns: bool) -> None:
        super().leave(returns)
        self._held.clear()
        if returns:
            self._join()

    def _join(self) -> None:
        """Give every rank the whole state of all optimizers."""
        alive = dict(self._loop.numbered_optimizers())
        gathered = self._group.share("optimizers that are still used", set(alive), range(self._group.world.size)).values()
        for number in sorted(set.intersection(*gathered)):
            if not has_inner(alive[number]):
                self._shards[alive[number]].join()

    def close(self) -> None:
        self._show()
        self._held.clear()
        for optimizer in self._hooked:
            step_hooks(optimizer)[1].pop(id(self), None)
        super().close()

    def _is_whole(self, optimizer: Optimizer) -> bool:
        """Whether ``optimizer`` steps as in a single process; all ranks step an outer optimizer's own part in the same way."""
        return is_alone() or has_inner(optimizer) or self._loop.is_of_one_batch(optimizer)

    def _number(self, optimizer: Optimizer) -> int:
        """The number of ``optimizer`` on all ranks; a copy of one gets a number and shards at its first use."""
        number = self._loop.number(optimizer)
        if number is None:
            number = self._loop.register(optimizer)
            self.own_parameters(optimizer)
        return number

    def _hold(self, number: int, optimizer: Optimizer) -> None:
        """Keep ``optimizer`` until a later one steps: a rank that has left must still have its shard when others step."""
        if number not in self._held:
            for former in self._former:
                self._held.pop(former, None)
            self._former.clear()
            self._held[number] = optimizer
        self._former.discard(number)

    def _known(self, number: int) -> StatePartition:
        optimizer = dict(self._loop.numbered_optimizers()).get(number)
        if optimizer is None:
            raise RankMismatchError(
                f"rank {self._group.world.rank} has left the training loop, and its optimizer no longer exists, but other ranks need its "
                "part of the state to step. Keep the optimizer until all ranks have finished, or let all ranks take the same number of "
                "steps."
            )
        return self._shards[optimizer]

    def _answer_step(self, number: int, present: list[int]) -> None:
        """Hand this rank's shard to a rank that steps, while this rank waits for something else."""
        shards = self._known(number)
        shards.settle(present)
        shards.send()

    def _answer_state(self, number: int, present: list[int]) -> None:
        """Send this rank's shard to ranks that ask for the whole state, while this rank waits for something else."""
        shards = self._known(number)
        shards.settle(present, hands_on=False)
        shards.whole({"state": {}})

    @contextmanager
    def _catching_up(self) -> Iterator[None]:
        """Leave this rank's shards as they are inside the block, where it copies the rest of another rank's state."""
        self._catches_up = True
        try:
            yield
        finally:
            self._catches_up = False

    def _hide(self) -> None:
        for p in self._stepping.others() if self._stepping else ():
            if p.grad is not None:
                self._hidden.append((p, p.grad))
                p.grad = None

    def _show(self) -> None:
        for p, grad in self._hidden:
            p.grad = grad
        self._hidden.clear()


def _step(number: int) -> str:
    return f"a step of optimizer {number}, whose state is in shards"


def _state(number: int) -> str:
    return f"the state of optimizer {number}, which is in shards"
