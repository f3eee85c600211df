"""A worker's side of parameter servers: pushes gradients and pulls values for each optimizer.

Buffers keep the last pulled values, to detect what a script has changed by hand.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from parwrap.coordination.call_site import location, warn
from parwrap.coordination.sync_points import FIRST_BACKWARD
from parwrap.errors import UsageError
from parwrap.group.group import Group
from parwrap.loop.loop_state import Loop, parameters_of
from parwrap.strategies.common.agreement import checksums
from parwrap.strategies.parameter_server.final_state import final_state_of, take_over
from parwrap.strategies.parameter_server.held_optimizer import Pushed
from parwrap.strategies.parameter_server.optimizer_transfer import options_of, packed, set_state, state_of
from parwrap.strategies.parameter_server.roles import Roles
from parwrap.strategies.parameter_server.server import Begun
from parwrap.strategies.parameter_server.transport import Kind, Layout, Message
from parwrap.strategies.zero1.state_partition import dealt_out
from parwrap.system.remote_exception import in_one_line

__all__ = ["Worker"]


@dataclass
class _Part:
    """The parameters of one optimizer that one server holds.

    Attributes:
        server: the rank of the server.
        parameters: these parameters.
        layout: the layout of the buffers.
        gradients: the gradients to push.
        values: the pulled values.
        known: the tensors in ``values``.
        sent: what was last pushed besides the gradients, pickled.
    """

    server: int
    parameters: list[torch.Tensor]
    layout: Layout = field(init=False)
    gradients: torch.Tensor = field(init=False)
    values: torch.Tensor = field(init=False)
    known: list[torch.Tensor] = field(init=False)
    sent: bytes = b""

    def __post_init__(self) -> None:
        self.layout = Layout(self.parameters)
        self.gradients, self.values = self.layout.buffer(), self.layout.buffer()
        self.known = self.layout.views(self.values)


class Worker:
    """Has servers take the steps of this worker's optimizers.

    Args:
        roles: the connection to the servers.
        group: the workers.
        loop: the loop state, which gives optimizers the same numbers on all workers.
        lr_factor: a function that returns the factor of learning rates.
    """

    def __init__(self, roles: Roles, group: Group, loop: Loop, lr_factor: Callable[[], float]) -> None:
        self._roles, self._transport, self._group, self._loop, self._lr_factor = roles, roles.transport, group, loop, lr_factor
        self._parts: dict[int, list[_Part]] = {}
        self._places: dict[int, tuple[tuple[int, int], int]] = {}
        self._known: dict[int, torch.Tensor] = {}
        self._dropped: set[int] = set()
        self._generation, self._ended, self._waiting, self._steps = -1, False, (False, 0), 0
        group.coordinator.answer(FIRST_BACKWARD, lambda detail, present: self._agree(None))

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether a server holds ``parameter``."""
        return id(parameter) in self._known

    def begin(self) -> None:
        """Register new parameters of optimizers with the servers before a backward, the same on all workers."""
        if self._generation == self._loop.generation:
            return
        new = {number: each for number, each in self._loop.numbered_optimizers() if self._is_new(number, each)}
        if not any(True for _ in self._loop.optimizers()):
            raise UsageError(
                f"the backward pass at {location()} runs before any optimizer is built, but a parameter server needs an optimizer for "
                "its steps. Build it first, or choose another strategy."
            )
        if new:
            self._group.synchronize(FIRST_BACKWARD)
            self._agree(new)
        self._generation = self._loop.generation

    def push(self, optimizer: Optimizer, weight: float) -> None:
        """Let the servers take a step of ``optimizer``, and copy the new values.

        Args:
            optimizer: one of this worker's.
            weight: the weight of its gradients, which are already multiplied by it.
        """
        self.begin()
        number = self._number(optimizer)
        if number is None:
            raise UsageError(
                f"{type(optimizer).__name__}.step() at {location()} runs before any backward pass, but a parameter server needs "
                "gradients for a step: call backward() first, or choose another strategy."
            )
        options = options_of(optimizer, self._lr_factor())
        self._steps += 1
        for part in self._parts[number]:
            self._push_changes(number, part)
            content = self._filled(part, options)
            message = Message(Kind.PUSH, number, self._group.coordinator.number, weight, content, part.gradients, self._steps)
            self._send(part.server, message)
        self._group.coordinator.fetching("a step of the parameter server", self._steps)
        for part in self._parts[number]:
            self._transport.answer_of(part.server, part.values)
            self._take(part)
        self._group.coordinator.fetched()

    def pull(self) -> None:
        """Pull the current values of all parameters that were not changed by hand."""
        for number in self._parts:
            self._pull(number)

    def taken_over(self) -> None:
        """Record the parameters' values as pulled: they come from another worker, not from a manual change."""
        for parts in self._parts.values():
            for part in parts:
                for p, known in zip(part.parameters, part.known, strict=True):
                    known.copy_(p.detach())

    def give(self, topic: str, content: Any, everywhere: bool = False) -> None:
        """Store ``content`` under ``topic`` on the first server, for other workers; with ``everywhere``, on all servers."""
        message = Message(Kind.PUT, content=pickle.dumps((topic, pickle.dumps(content))))
        for server in self._roles.servers[: None if everywhere else 1]:
            self._send(server, message)

    def get(self, topic: str) -> Any:
        """An object that another worker has stored, or will store."""
        return self._transport.ask(self._roles.servers[0], Message(Kind.TAKE, content=pickle.dumps(topic))).object

    @contextmanager
    def with_state(self, optimizer: Optimizer) -> Iterator[None]:
        """Give ``optimizer`` the servers' state inside the block."""
        number = self._number(optimizer)
        if number is None or self._ended:
            yield
            return
        set_state(optimizer, self._state(number))
        try:
            yield
        finally:
            optimizer.state.clear()

    def load(self, optimizer: Optimizer) -> None:
        """Make servers continue from the state that ``optimizer`` has got."""
        number = self._number(optimizer)
        if number is None or self._ended:
            return
        content = pickle.dumps((state_of(optimizer), options_of(optimizer, self._lr_factor())))
        for part in self._parts[number]:
            part.sent = b""
            self._send(part.server, Message(Kind.LOAD, number, content=content))
        optimizer.state.clear()

    def end(self, result: Any) -> None:
        """Copy worker 0's values everywhere and leave the servers, once all workers have ended.

        Args:
            result: the result of the function.
        """
        first = self._group.world.rank == 0
        self.pull() if first else take_over(self._loop, self.get("end"))
        for number, optimizer in self._loop.numbered_optimizers():
            if number in self._parts:
                set_state(optimizer, self._state(number))
        if first:
            self.give("end", final_state_of(self._loop, result), everywhere=True)
        for server in self._roles.servers:
            self._send(server, Message(Kind.END))
        self._ended = True

    def failed(self, error: BaseException) -> None:
        """Notify the servers that this worker has failed with ``error``."""
        text = f"failed with {in_one_line(error)}"
        for server in self._roles.servers if not self._ended else ():
            with suppress(RuntimeError):
                self._transport.send(server, Message(Kind.FAILED, content=pickle.dumps(text)), waits=False)
        self._ended = True

    def close(self) -> None:
        """Release the user's parameters."""
        self._ended = True
        self._parts.clear()
        self._places.clear()
        self._known.clear()

    def set_waiting(self, waiting: bool, step: int = 0) -> None:
        """Notify the servers that this worker begins or stops waiting for others, or for a file that worker 0 writes after ``step``."""
        if not self._ended and (waiting, step) != self._waiting:
            self._waiting = waiting, step
            for server in self._roles.servers:
                self._send(server, Message(Kind.WAIT if waiting else Kind.GO_ON, number=self._group.coordinator.number, step=step))

    def _send(self, server: int, message: Message) -> None:
        try:
            self._transport.send(server, message)
        except RuntimeError:
            self._transport.answer_of(server)  # that exception says more
            raise

    def _is_new(self, number: int, optimizer: Optimizer) -> bool:
        return number not in self._parts or sum(len(part.parameters) for part in self._parts[number]) != len(parameters_of(optimizer))

    def _number(self, optimizer: Optimizer) -> int | None:
        """The number of ``optimizer``, if servers know it."""
        number = self._loop.number(optimizer)
        return number if number in self._parts else None

    def _agree(self, new: dict[int, Optimizer] | None) -> None:
        """Send ``new`` optimizers to the servers from the lowest rank in a backward; ``new`` is ``None`` on a rank that is elsewhere."""
        ranks = [rank for rank in range(self._group.world.size) if rank not in self._roles.lost()]
        mine = None if new is None else {number: checksums(parameters_of(each)) for number, each in new.items()}
        own = dict(self._loop.numbered_optimizers())
        views = self._group.share(FIRST_BACKWARD, (mine, set(own)), ranks)
        described = {rank: view for rank, (view, _) in views.items() if view is not None}
        source = min(described)
        for number in sorted(set().union(*described.values())):
            if number in own:
                self._lay_out(number, own[number])
        if self._group.world.rank == source:
            if self._dropped:
                for server in self._roles.servers:
                    self._send(server, Message(Kind.DROP, content=pickle.dumps(self._dropped)))
            for number, optimizer in (new or {}).items():
                self._register(number, optimizer)
        self._drop(self._parts.keys() - set().union(*(alive for _, alive in views.values())))
        self._group.share("parameter servers know", True, [source])
        different = len({pickle.dumps(view) for view in described.values()}) > 1
        if different and self._group.world.rank == source:
            warn(
                f"parwrap: the workers built parameters with different values; rank {source}'s are used. Set the seed before you build "
                "the model, or build it inside the decorated function."
            )
        for number in set().union(*described.values()) & own.keys():
            for part in self._parts[number]:
                self._transport.ask(part.server, Message(Kind.PULL, number), part.values)
                self._take(part, unseen=True)
            own[number].state.clear()

    def _drop(self, numbers: set[int]) -> None:
        """Drop optimizers that no worker has any longer; servers are notified when all have copied the last values."""
        for number in numbers:
            self._pull(number, unseen=True)
            del self._parts[number]
        self._dropped = numbers
        left = {id(p) for parts in self._parts.values() for part in parts for p in part.parameters}
        self._places = {key: place for key, place in self._places.items() if key in left}
        self._known = {key: known for key, known in self._known.items() if key in left}

    def _lay_out(self, number: int, optimizer: Optimizer) -> None:
        parameters = parameters_of(optimizer)
        new = [(place, p) for place, p in enumerate(parameters) if id(p) not in self._places]
        chosen = dealt_out([p.numel() * p.element_size() for _, p in new], [0] * len(self._roles.servers))
        self._places |= {id(p): ((number, place), holder) for (place, p), holder in zip(new, chosen, strict=True)}
        several: dict[int, list[torch.Tensor]] = {}
        for p in parameters:
            several.setdefault(self._roles.servers[self._places[id(p)][1]], []).append(p)
        self._parts[number] = [_Part(server, part) for server, part in sorted(several.items())]
        for part in self._parts[number]:
            for p, known in zip(part.parameters, part.known, strict=True):
                known.copy_(p.detach())
                self._known[id(p)] = known

    def _register(self, number: int, optimizer: Optimizer) -> None:
        try:
            sent: bytes | str = packed(optimizer)
        except Exception as error:  # whatever a user's class may raise
            sent = f"{type(error).__name__}: {error}"
        kinds = [(tuple(p.shape), p.dtype) for p in parameters_of(optimizer)]
        keys, holders = zip(*(self._places[id(p)] for p in parameters_of(optimizer)), strict=True)
        begun = Begun(sent, kinds, list(keys), list(holders), options_of(optimizer, self._lr_factor()))
        for part in self._parts[number]:
            self._transport.ask(part.server, Message(Kind.BEGIN, number, content=pickle.dumps(begun), values=part.values))

    def _filled(self, part: _Part, options: list[dict[str, Any]]) -> bytes:
        """Write gradients into the buffer, and return the other data to push; empty if unchanged."""
        present, sparse = [], {}
        for place, (p, view) in enumerate(zip(part.parameters, part.layout.views(part.gradients), strict=True)):
            if p.grad is None:
                continue
            if p.grad.is_sparse:
                grad = p.grad.detach().coalesce()
                sparse[place] = (grad.indices().cpu(), grad.values().cpu(), grad.shape)
            else:
                present.append(place)
                view.copy_(p.grad.detach())
        content = pickle.dumps(Pushed(tuple(present), sparse, options))
        if content == part.sent and not sparse:
            return b""
        part.sent = content
        return content

    def _changed(self, part: _Part) -> list[int]:
        """The positions of the parameters that the script has changed by hand since they were pulled."""
        return [place for place, p in enumerate(part.parameters) if not torch.equal(self._known[id(p)].view(p.shape), p.detach().to("cpu"))]

    def _push_changes(self, number: int, part: _Part) -> None:
        changed = self._changed(part)
        if changed:
            buffer = part.layout.buffer()
            for view, p in zip(part.layout.views(buffer), part.parameters, strict=True):
                view.copy_(p.detach())
            self._send(part.server, Message(Kind.SET, number, content=pickle.dumps(changed), values=buffer))

    def _take(self, part: _Part, unseen: bool = False, without: Collection[int] = ()) -> None:
        """Write the pulled values to the parameters, except at positions ``without``; ``unseen`` hides the write from autograd."""
        with torch.no_grad():
            for place, (p, known) in enumerate(zip(part.parameters, part.known, strict=True)):
                if place not in without:
                    (p.data if unseen else p).copy_(known)
                    self._known[id(p)] = known

    def _pull(self, number: int, unseen: bool = False) -> None:
        for part in self._parts[number]:
            kept = {place: part.known[place].clone() for place in self._changed(part)}
            self._transport.ask(part.server, Message(Kind.PULL, number), part.values)
            for place, known in kept.items():  # a script that restores a value has changed nothing
                part.known[place].copy_(known)
            self._take(part, unseen, without=kept)

    def _state(self, number: int) -> dict[int, dict[str, Any]]:
        state: dict[int, dict[str, Any]] = {}
        for part in self._parts[number]:
            state |= self._transport.ask(part.server, Message(Kind.STATE, number)).object
        return state
