"""ZeRO stage 1: ranks average gradients as in DDP; each rank steps the parameters whose optimizer state it holds, and sends them.

The optimizer stays the script's object with all groups. A step leaves out parameters without a gradient, so during a step each rank
hides the gradients of the parameters that other ranks step. (Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054;
``torch.distributed.optim.ZeroRedundancyOptimizer``.)
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from parwrap.errors import LockstepError, RankMismatchError, UsageError
from parwrap.intercept.intercepted_calls import Backward
from parwrap.intercept.step_hooks import is_image
from parwrap.loop.modules import has_values
from parwrap.loop.optimizers import parameters_of
from parwrap.places import Place, script_place
from parwrap.ranks.agreement import agree, agree_on, first_difference, first_other
from parwrap.ranks.collectives import by_kind
from parwrap.ranks.group import Group, is_alone
from parwrap.ranks.structures import mapped
from parwrap.strategies.ddp import DDP
from parwrap.strategies.strategy import Loop, refuse_one_vector
from parwrap.torch_private.distributed import all_gather_single
from parwrap.torch_private.optimizer import step_hooks, stepping

__all__ = ["Zero1", "dealt_out"]

GATHERED, BROADCAST = 2**24, 2**20
"""About how many elements arrive at a time, by an all-gather or a broadcast: they need memory beside the parameters."""

HOOK = -1
"""The key of parwrap's hooks on an optimizer; torch numbers the script's hooks from 0."""


@dataclass
class _Step:
    """A running step.

    Attributes:
        optimizer: the optimizer that steps.
        place: the line that called the step.
        hidden: the parameters that other ranks step, with their gradients.
    """

    optimizer: Optimizer
    place: Place
    hidden: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def hide(self, parameters: Iterable[torch.Tensor]) -> None:
        for p in parameters:
            if p.grad is not None:
                self.hidden.append((p, p.grad))
                p.grad = None

    def show(self) -> None:
        for p, grad in self.hidden:
            p.grad = grad
        self.hidden.clear()


class Zero1(DDP):
    """DDP with the optimizers' state in shards."""

    def __init__(self, loop: Loop) -> None:
        super().__init__(loop)
        self._shards: weakref.WeakKeyDictionary[Optimizer, _Shards] = weakref.WeakKeyDictionary()
        self._sharded: list[weakref.ref[Optimizer]] = []  # in the order in which all ranks have met them
        self._steps: list[_Step] = []

    def built(self, optimizer: Optimizer) -> None:
        if not self._is_whole(optimizer):
            refuse_one_vector(optimizer, "zero1")

    def _is_whole(self, optimizer: Optimizer) -> bool:
        """Whether ``optimizer`` steps all parameters on this rank, as in one process."""
        return is_alone() or self.loop.optimizers.is_of_batch(optimizer)

    def _shards_of(self, optimizer: Optimizer) -> _Shards:
        if optimizer not in self._shards:
            refuse_one_vector(optimizer, "zero1")
            self._shards[optimizer] = _Shards(optimizer, self.loop.group)
            self._sharded.append(weakref.ref(optimizer))
        self._shards[optimizer].deal()
        return self._shards[optimizer]

    # steps

    def step(self, optimizer: Optimizer) -> None:
        super().step(optimizer)
        if self._steps:
            self._refuse_after_failure(stepping()[1:])
        if self._is_whole(optimizer):
            return
        self._shards_of(optimizer)
        # these run between the script's hooks: a script's pre-hook sees all gradients, its post-hook all weights, as for a moving average
        before, after = step_hooks(optimizer)
        before[HOOK], after[HOOK] = self._begin, self._exchange
        before.move_to_end(HOOK)
        after.move_to_end(HOOK, last=False)

    def _begin(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Hide the gradients of parameters that other ranks step: now, or with a closure each time the closure has computed gradients."""
        if is_image(args[0]):  # a step that is skipped
            return None
        step, shards = _Step(optimizer, script_place()), self._shards[optimizer]
        self._steps.append(step)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            step.hide(shards.others())
            return None
        calls = 0

        def then_hide() -> Any:
            nonlocal calls
            step.show()
            if calls:  # the step has moved this rank's parameters since
                shards.send()
            calls += 1
            loss = closure()
            step.hide(shards.others())
            return loss

        return ((args[0], then_hide, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": then_hide})

    def _exchange(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        """Show the hidden gradients again, and exchange the stepped parameters with the other ranks."""
        if is_image(args[0]):
            return
        self._steps.pop().show()
        self._shards[optimizer].send()

    def stepped(self, optimizer: Optimizer) -> None:
        if all(step.optimizer is not optimizer for step in self._steps):  # a subclass's step is around that of its base
            _unhook(optimizer)
        super().stepped(optimizer)

    def backward(self, call: Backward) -> None:
        if self._steps:  # the backward of a closure runs inside a step
            self._refuse_after_failure(stepping())
        super().backward(call)

    def _refuse_after_failure(self, running: Sequence[Optimizer]) -> None:
        """Refuse to go on after a step that has raised: a step that has begun, but whose optimizer is not ``running`` any more."""
        for step in self._steps:
            if all(each is not step.optimizer for each in running):
                raise LockstepError(
                    f"the step of {type(step.optimizer).__name__} at {step.place} has raised, and the script has caught the error: the "
                    "other ranks may still wait for the weights that this rank steps with strategy='zero1'. Let the error end the job."
                )

    # state

    def optimizer_state(self, optimizer: Optimizer, original: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the whole state on every rank, as one process would have it."""
        if is_alone():
            raise UsageError(
                f"{script_place()} asks for {type(optimizer).__name__}.state_dict(), which needs all ranks with strategy='zero1', because "
                "each holds a part of the state. But code inside @parwrap.rank_zero_only or rank_zero_first runs without the other ranks: "
                "call state_dict() before that code, on all ranks, and save the result inside."
            )
        state = original()
        return state if self._is_whole(optimizer) else self._shards_of(optimizer).whole(state)

    def load_optimizer_state(self, optimizer: Optimizer, original: Callable[[dict[str, Any]], None], state: dict[str, Any]) -> None:
        """Load this rank's part of ``state``, which is a whole state dict."""
        original(state if self._is_whole(optimizer) else self._shards_of(optimizer).own(state))

    def make_whole(self) -> None:
        """Give every rank the whole states of those optimizers that all ranks still hold."""
        optimizers = [each() for each in self._sharded]
        held = self.loop.group.on_all_ranks("optimizers that are still used", (each is not None for each in optimizers))
        for optimizer, everywhere in zip(optimizers, held, strict=True):
            if optimizer is not None and everywhere:
                self._shards[optimizer].join()

    def close(self) -> None:
        """Show the gradients that a step has hidden, as after an error, and remove all hooks."""
        for step in self._steps:
            step.show()
        for optimizer in list(self._shards):
            _unhook(optimizer)
        super().close()


def _unhook(optimizer: Optimizer) -> None:
    for hooks in step_hooks(optimizer):
        hooks.pop(HOOK, None)


def dealt_out(sizes: Sequence[int], loads: list[int]) -> list[int]:
    """The rank that gets each parameter: the largest first, always to the rank with the least load, as in ``ZeroRedundancyOptimizer``.

    Args:
        sizes: the size of each parameter, in elements or bytes.
        loads: the size of what each rank has already, in the same unit; updated in place.

    >>> dealt_out([3, 5, 4], [0, 0])
    [1, 0, 1]
    """
    ranks = [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        ranks[place] = loads.index(min(loads))
        loads[ranks[place]] += sizes[place]
    return ranks


class _Shards:
    """Which rank holds the state of each parameter of one optimizer."""

    def __init__(self, optimizer: Optimizer, group: Group) -> None:
        self._ref, self._group = weakref.ref(optimizer), group
        self._owners: dict[torch.Tensor, int] = {}

    @property
    def _optimizer(self) -> Optimizer:
        optimizer = self._ref()
        assert optimizer is not None
        return optimizer

    def deal(self) -> None:
        """Assign new parameters to ranks, group by group, and drop the state of parameters that other ranks step.

        A copy of the optimizer gets the same assignment.
        """
        groups = [[p for p in group["params"] if p not in self._owners and has_values(p)] for group in self._optimizer.param_groups]
        if not any(groups):
            return
        shapes = [[(tuple(p.shape), str(p.dtype)) for p in group] for group in groups]
        error = functools.partial(_different_groups, type(self._optimizer).__name__)
        agree_on(self._group, "dealing out the state of an optimizer", shapes, error)
        self._owners = {p: self._owners[p] for p in parameters_of(self._optimizer) if p in self._owners}
        loads = [0] * self._group.world.size
        for p, owner in self._owners.items():
            loads[owner] += p.numel()
        for group in groups:
            self._owners.update(zip(group, dealt_out([p.numel() for p in group], loads), strict=True))
        for p in self.others():
            self._optimizer.state.pop(p, None)

    def others(self) -> list[torch.Tensor]:
        """The parameters that this rank does not step."""
        return [p for p in parameters_of(self._optimizer) if self._owners.get(p) != self._group.world.rank]

    @torch.no_grad()
    def send(self) -> None:
        """Send each trained parameter from the rank that steps it, a piece of each rank's at a time."""
        trained = [p for p in parameters_of(self._optimizer) if p in self._owners and (p.requires_grad or p.grad is not None)]
        size, most = self._group.world.size, GATHERED // self._group.world.size if _gathers(self._group) else BROADCAST
        trained.sort(key=torch.Tensor.numel, reverse=True)  # so that the pieces of ranks are about as large
        with self._group.control_message("sending the weights of a step"):
            for parameters in by_kind(trained, lambda p: (p.dtype, p.device)).values():
                of_ranks = [_pieces([p for p in parameters if self._owners.get(p) == owner], most) for owner in range(size)]
                for pieces in zip_longest(*of_ranks, fillvalue=()):
                    self._exchange(pieces)

    def _exchange(self, pieces: Sequence[Sequence[torch.Tensor]]) -> None:
        """Send the parameters of this rank's piece, and write those that arrive from other ranks."""
        rank, sizes = self._group.world.rank, [sum(p.numel() for p in piece) for piece in pieces]
        longest, like = max(sizes), next(p for piece in pieces for p in piece)
        if _gathers(self._group) and 2 * sum(sizes) > len(sizes) * longest:  # else most of it would be padding
            everything = like.new_empty(len(sizes) * longest)
            all_gather_single(everything, _flat(pieces[rank], like, longest))
            arrived: dict[int, torch.Tensor] = dict(enumerate(everything.chunk(len(sizes))))
        else:
            arrived = {
                owner: _flat(pieces[rank], like, size) if owner == rank else like.new_empty(size)
                for owner, size in enumerate(sizes)
                if size
            }
            for owner, flat in arrived.items():
                dist.broadcast(flat, owner)
        for owner, flat in arrived.items():
            if owner != rank:
                parts = flat.split([*(p.numel() for p in pieces[owner]), len(flat) - sizes[owner]])
                for p, values in zip(pieces[owner], parts, strict=False):
                    p.copy_(values.view_as(p))

    def whole(self, state: dict[str, Any]) -> dict[str, Any]:
        """``state``, this rank's state dict, merged with those of the other ranks, on the CPU."""
        merged = _arrived(self._gathered(state["state"]), torch.device("cpu"))
        others = {key: each for key, each in state["state"].items() if key not in range(len(self._owners))}  # entries of no parameter
        return {**state, "state": {**others, **merged}}

    def own(self, state: dict[str, Any]) -> dict[str, Any]:
        """The part of a whole state dict that this rank holds."""
        keys = [key for group in state["param_groups"] for key in group["params"]]
        others = {
            key for key, p in zip(keys, parameters_of(self._optimizer), strict=False) if self._owners.get(p) != self._group.world.rank
        }
        return {**state, "state": {key: each for key, each in state["state"].items() if key not in others}}

    def join(self) -> None:
        """Put the whole state of all ranks into this rank's optimizer."""
        self.deal()
        parameters, state = list(parameters_of(self._optimizer)), self._optimizer.state
        gathered = self._gathered({place: state[p] for place, p in enumerate(parameters) if p in state})
        for place, p in enumerate(parameters):  # in the order of one process
            mine = state.pop(p, None)
            if place in gathered:
                state[p] = mine if self._owners.get(p) == self._group.world.rank else _arrived(gathered[place], p.device)

    def _gathered(self, states: dict[Any, Any]) -> dict[int, Any]:
        """Gather the states of all parameters, by their places; each rank sends those of ``states`` that it holds."""
        rank = self._group.world.rank
        mine = {
            place: _sent(states[place])
            for place, p in enumerate(parameters_of(self._optimizer))
            if self._owners.get(p) == rank and place in states
        }
        shards: list[Any] = [None] * self._group.world.size
        agree(self._group, "gathering the state of an optimizer", len(self._owners))
        with self._group.control_message("gathering the state of an optimizer"):
            dist.all_gather_object(shards, mine, group=self._group.control)
        return dict(sorted(item for shard in shards for item in shard.items()))


def _gathers(group: Group) -> bool:
    """Whether one all-gather is faster than a broadcast of each rank. Gloo copies all that an all-gather brings once more."""
    return group.backend != "gloo"


def _pieces(parameters: Iterable[torch.Tensor], most: int) -> Iterator[list[torch.Tensor]]:
    """``parameters`` in pieces of ``most`` elements, or of as many more as the last parameter of a piece has."""
    piece: list[torch.Tensor] = []
    for p in parameters:
        piece.append(p)
        if sum(each.numel() for each in piece) >= most:
            yield piece
            piece = []
    if piece:
        yield piece


def _flat(piece: Sequence[torch.Tensor], like: torch.Tensor, length: int) -> torch.Tensor:
    """The values of a piece in one vector of ``length``, with padding at its end."""
    padding = like.new_zeros(length - sum(p.numel() for p in piece))
    return torch.cat([*(p.reshape(-1) for p in piece), padding])


class _FromGpu:
    """A tensor from a GPU, sent through the CPU. Tensors that are on the CPU, such as Adam's count of steps, are not wrapped."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.cpu()


def _sent(state: Any) -> Any:
    return mapped(state, lambda leaf: _FromGpu(leaf) if isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu" else leaf)


def _arrived(state: Any, device: torch.device) -> Any:
    return mapped(state, lambda leaf: leaf.tensor.to(device) if isinstance(leaf, _FromGpu) else leaf)


def _different_groups(optimizer: str, all_ranks: Sequence[list[Any]]) -> RankMismatchError:
    every = [[(number, *each) for number, group in enumerate(groups) for each in group] for groups in all_ranks]
    if all(each == every[0] for each in every):
        rank, theirs = first_other(all_ranks)
        found = f"rank 0 has {len(all_ranks[0])}, and rank {rank} has {len(theirs)}"
    else:
        at, mine, rank, theirs = first_difference(every, lambda each: f"one of shape {each[1]} and {each[2]} in group {each[0]}")
        found = f"parameter {at} is {mine} on rank 0, and {theirs} on rank {rank}"
    return RankMismatchError(
        f"the param_groups of {optimizer} differ between ranks: {found}. Build the same optimizers with the same parameters on every rank."
    )
