"""Parameter servers: the last ranks hold the weights and step; the other ranks, the workers, push gradients and pull new values.

In a step, workers talk only to servers. Each worker has its own pace, at most ``staleness`` steps ahead of the slowest. With
``staleness=0`` all workers step together, and train what ``ddp`` trains. ``ps_server.py`` is the side of the servers. (Li et al., 2014,
https://www.usenix.org/conference/osdi14/technical-sessions/presentation/li_mu; stale synchronous: Ho et al., 2013.)
"""

from __future__ import annotations

import itertools
import pickle
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from parwrap.errors import LockstepError, RankMismatchError, UsageError, in_one_line
from parwrap.intercept.intercepted_calls import Backward
from parwrap.loop.optimizers import parameters_of
from parwrap.loop.passes import loss_factor
from parwrap.options import Options
from parwrap.places import script_place, warn
from parwrap.ranks.device import torch_backend
from parwrap.ranks.group import Group, is_alone, within
from parwrap.strategies.ddp_sites import made_equal
from parwrap.strategies.ps_server import Begun, Connections, Kind, Layout, Message, Pushed, Served, Server, packed, set_state, state_of
from parwrap.strategies.strategy import Loop, OneModel, differing_parameter
from parwrap.strategies.zero1 import dealt_out
from parwrap.torch_private.distributed import quiet_gloo

__all__ = ["ParameterServer", "Workers", "divided"]

_divisions = itertools.count()
"""Counts how often ranks were divided into workers and servers in this process. The count is the same on all ranks."""


class HasResult(Protocol):
    """A call of the user's function, with its result."""

    result: Any


@dataclass
class Workers(Group):
    """The process group of the workers, and what connects them with the servers.

    Attributes:
        connections: sends messages to the servers, and receives their answers.
        servers: the ranks of the servers.
        call: the call of the user's function; it has the result once the function has ended.
    """

    connections: Connections = field(kw_only=True)
    servers: range = field(kw_only=True)
    call: HasResult = field(kw_only=True)


@contextmanager
def divided(
    group: Group, options: Options, trained: Sequence[nn.Module | Optimizer], call: HasResult
) -> Iterator[tuple[Workers | None, Server | None]]:
    """Divide the ranks of ``group`` into workers and servers inside the block.

    Yields a pair: on the first ranks the open group of the workers and ``None``, on the others ``None`` and a server.
    On a server, the first backward serves the workers and then leaves the block. After that, ``trained`` and ``call.result`` are those of
    worker 0 at its end.

    Args:
        group: all ranks.
        options: the number of servers, and how many steps workers may be apart.
        trained: the modules and optimizers that the function was called with.
        call: gets the result of the function when it has ended.

    Raises:
        UsageError: there are too few ranks.
    """
    world = group.world
    workers = world.size - options.servers
    if workers < 1:
        raise UsageError(
            f"servers={options.servers} leaves no worker among {world.size} ranks: start at least {options.servers + 1} ranks, or choose "
            "fewer servers."
        )
    assert group.store is not None
    assert group.folder is not None
    name = f"workers-{next(_divisions)}"
    with quiet_gloo():
        all_ranks = dist.new_group(backend="gloo", timeout=group.timeout)
        training = dist.new_group(list(range(workers)), backend=torch_backend(group.backend), timeout=group.timeout)
        control = dist.new_group(list(range(workers)), backend="gloo", timeout=group.timeout)
    connections = Connections(all_ranks)
    try:
        if world.rank >= workers:
            server = Server(connections, workers, world.rank, options.staleness, group.device)
            with within(None, None, replace(world, size=workers)), suppress(Served):
                yield None, server
            if server.result:
                states, call.result = pickle.loads(server.result)
                for each, state in zip(trained, states, strict=True):
                    each.load_state_dict(state)
            return
        node_ranks = tuple(rank for rank in world.node_ranks if rank < workers)
        among = replace(world, size=workers, local_size=len(node_ranks), node_ranks=node_ranks)
        folder = group.folder / name
        folder.mkdir(mode=0o700, exist_ok=True)
        store = dist.PrefixStore(name, group.store)
        own = Workers(
            among, group.backend, group.device, group.timeout, store, folder, control,
            connections=connections, servers=range(workers, world.size), call=call,
        )  # fmt: skip
        with within(own, training, among):
            yield own, None
    finally:
        for each in (all_ranks, *((training, control) if world.rank < workers else ())):
            dist.destroy_process_group(each)


@dataclass
class _Part:
    """The parameters of one optimizer that one server holds.

    Attributes:
        server: the rank of the server.
        parameters: the parameters.
        layout: the places of the parameters in buffers.
        values: the values that were pulled last, in one buffer.
        known: views of ``values``, one for each parameter.
    """

    server: int
    parameters: list[torch.Tensor]
    layout: Layout = field(init=False)
    values: torch.Tensor = field(init=False)
    known: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.layout = Layout(self.parameters)
        self.values = self.layout.filled(self.parameters)
        self.known = self.layout.views(self.values)


class ParameterServer(OneModel):
    """Lets servers take the steps of this worker's optimizers."""

    def __init__(self, loop: Loop) -> None:
        super().__init__(loop)
        assert isinstance(loop.group, Workers)
        self._group, self._staleness = loop.group, loop.options().staleness
        self._first: list[nn.Module | Optimizer] = [*loop.modules.first, *loop.optimizers.all()]
        self._numbers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._versions: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()  # whose parameters the servers hold
        self._parts: dict[int, list[_Part]] = {}
        self._known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # the value of each parameter that was pulled last
        self._keys: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # the number and server of each parameter
        self._met = self._registered = 0
        self._generation = -1
        self._trained = False
        self._last = Message(Kind.FAILED)
        self._failed: set[int] = set()

    def backward(self, call: Backward) -> None:
        """Run ``call``, whose gradients stay on this worker; before that, send new optimizers to the servers.

        With ``staleness=0``, write the mean over workers into the loss.
        """
        loop, weight = self.loop, self._weight(call)
        if self._generation != loop.optimizers.generation:
            self._register()
        root, added = loop.losses.root(call), loop.divisors.weigh(call)
        scale = weight * loss_factor(weight, self._group.world.size, loop.options(), loop.passes.reads_whole)
        loss = None if root is None else (root.data if added is None else root.data + added) * scale
        call.times(scale).run()
        if root is not None and self._staleness == 0:
            assert loss is not None
            loop.losses.write_mean(root, self._mean(loss))
        loop.passes.ran_backward()
        self._trained = True

    def _mean(self, loss: torch.Tensor) -> float:
        """The mean of ``loss`` over the workers, for ``staleness=0``: scripts that decide by the loss must decide alike on all workers."""
        total = self._group.all_reduce("the loss of a step", loss.reshape(1).to("cpu", torch.float64))
        return total.item() / self._group.world.size

    # new optimizers

    def _register(self) -> None:
        """Send new optimizers, and optimizers with new parameters, to the servers, once all workers have reached this point."""
        optimizers = self.loop.optimizers
        if not optimizers.all():
            raise UsageError(
                f"{script_place()} runs a backward before any optimizer is built, but strategy='parameter_server' needs the optimizer for "
                "its steps: build the optimizer first. For updates by hand, use strategy='ddp'."
            )
        new = [each for each in optimizers.all() if self._versions.get(each) != optimizers.version(each)]
        self._refuse_other_kinds(p for each in new for p in parameters_of(each))
        if new:
            about = [(tuple(p.shape), str(p.dtype), number) for number, each in enumerate(new) for p in parameters_of(each)]
            self._pull_all("new optimizers", unseen=True, about=about)
            self._drop_unused()
            for optimizer in new:
                made_equal(self._group, [p for p in parameters_of(optimizer) if p not in self._keys])
                self._lay_out(optimizer)
                self._versions[optimizer] = optimizers.version(optimizer)
            if self._group.world.rank == 0:
                for optimizer in new:
                    self._begin(optimizer)
            self._meet("optimizers on their way to the servers")
            for optimizer in new:
                optimizer.state.clear()
        self._generation = optimizers.generation

    def _drop_unused(self) -> None:
        """Drop optimizers that no worker holds any more. Workers ask each other, because Python may collect an optimizer later on one."""
        alive = set(self._numbers.values())
        dropped = self._group.on_all_ranks("optimizers that are still used", (number not in alive for number in self._parts))
        self._parts = {number: parts for (number, parts), gone in zip(self._parts.items(), dropped, strict=True) if not gone}

    def _lay_out(self, optimizer: Optimizer) -> None:
        """Assign new parameters to the servers. All workers compute the same assignment."""
        if optimizer not in self._numbers:
            self._numbers[optimizer] = self._registered
            self._registered += 1
        new = [p for p in parameters_of(optimizer) if p not in self._keys]
        servers = self._group.servers
        for p, place in zip(new, dealt_out([p.numel() * p.element_size() for p in new], [0] * len(servers)), strict=True):
            self._keys[p] = self._met, servers[place]
            self._met += 1
        several: dict[int, list[torch.Tensor]] = {}
        for p in parameters_of(optimizer):
            several.setdefault(self._keys[p][1], []).append(p)
        parts = [_Part(server, held) for server, held in sorted(several.items())]
        self._parts[self._numbers[optimizer]] = parts
        for part in parts:
            self._note(part)

    def _begin(self, optimizer: Optimizer) -> None:
        try:
            sent = packed(optimizer)
        except Exception as error:  # whatever a class of the script raises
            raise UsageError(
                f"a {type(optimizer).__name__} cannot be sent to the parameter servers ({error}): define its class at the top level of a "
                "module, without lambdas in its attributes, or choose another strategy."
            ) from error
        keys, holders = zip(*(self._keys[p] for p in parameters_of(optimizer)), strict=True)
        kinds = [(p.shape, p.dtype, p.device.type) for p in parameters_of(optimizer)]
        first = self._group.servers[0]
        begun = Begun(sent, kinds, list(keys), [each - first for each in holders], self._options_of(optimizer), set(self._parts))
        for part in self._parts[self._numbers[optimizer]]:
            self._ask(part.server, Message(Kind.BEGIN, self._numbers[optimizer], pickle.dumps(begun), part.values))

    def _options_of(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        """The options of the optimizer's groups, with learning rates scaled for this number of workers."""
        factor = self.loop.options().lr_factor(self._group.world.size)
        groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
        return groups if factor == 1.0 else [{**each, "lr": each["lr"] * factor} if "lr" in each else each for each in groups]

    # steps

    def skips(self, optimizer: Optimizer) -> bool:
        """Let the servers step with this worker's gradients, take the new values, and return true.

        Return false if the optimizer must step itself: it belongs to a batch, or this rank runs alone.
        """
        if is_alone() or self.loop.optimizers.is_of_batch(optimizer):
            return False
        if hasattr(optimizer, "found_inf"):
            raise UsageError(
                f"{script_place()} lets a GradScaler step a fused {type(optimizer).__name__}, which unscales its gradients itself, but a "
                "parameter server takes the step: build the optimizer without fused=True, or choose another strategy."
            )
        self._step(optimizer)
        return True

    def left_out(self, optimizer: Optimizer) -> None:
        """Tell the servers that this worker has left the step out. They must know, because other workers may wait for this step.

        With ``staleness=0``, where servers step for all workers together, the step is left out for all.
        """
        if not is_alone() and not self.loop.optimizers.is_of_batch(optimizer):
            self._step(optimizer, left_out=True)

    def _step(self, optimizer: Optimizer, left_out: bool = False) -> None:
        number = self._numbers.get(optimizer)
        if number is None:
            raise UsageError(
                f"{type(optimizer).__name__}.step() at {script_place()} comes before any backward, but a parameter server steps with "
                "gradients: call backward() first, or choose another strategy."
            )
        same_step, place = self.loop.same_step, str(script_place())
        if self._staleness != 0:
            self._name_whole()
        if self._staleness is None:
            same_step.passed(place)
        else:  # workers must take equally many steps
            same_step.meets(number, place)
        options = self._options_of(optimizer)
        for part in self._parts[number]:
            self._push_changes(number, part)
            self._send(part.server, self._gradients(number, part, options, left_out))
        for part in self._parts[number]:
            self._received(part.server, part.values)
            self._take(part)
        self.loop.optimizers.stepped(optimizer)  # on this rank the optimizer itself does not step
        same_step.positions.run()

    def _gradients(self, number: int, part: _Part, options: list[dict[str, Any]], left_out: bool) -> Message:
        pushed, buffer = Pushed([], {}, options, left_out), part.layout.buffer()
        for place, (p, view) in enumerate(zip(part.parameters, part.layout.views(buffer), strict=True)):
            if p.grad is None or left_out:
                continue
            if p.grad.is_sparse:
                grad = p.grad.detach().coalesce()
                pushed.sparse[place] = (grad.indices().cpu(), grad.values().cpu(), grad.shape)
            else:
                pushed.dense.append(place)
                view.copy_(p.grad.detach())
        return Message(Kind.PUSH, number, pickle.dumps(pushed), buffer if pushed.dense else None)

    def closure(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        raise UsageError(
            f"{type(optimizer).__name__}.step(closure) at {script_place()} cannot run on a parameter server: the server takes the "
            "step, but the closure computes gradients on the worker. Call backward() and then step() without a closure, or choose another "
            "strategy."
        )

    # values

    def _note(self, part: _Part) -> None:
        for p, known in zip(part.parameters, part.known, strict=True):
            self._known[p] = known

    @torch.no_grad()
    def _take(self, part: _Part, unseen: bool = False) -> None:
        """Write the pulled values into the parameters; if ``unseen``, through ``.data``, so that autograd does not see it."""
        self._note(part)
        for p, known in zip(part.parameters, part.known, strict=True):
            (p.data if unseen else p).copy_(known)

    def _push_changes(self, number: int, part: _Part) -> None:
        """Push the values that the script has changed by hand since they were pulled."""
        changed = [place for place, p in enumerate(part.parameters) if not torch.equal(self._known[p].view(p.shape), p.detach().cpu())]
        if changed:
            self._ask(part.server, Message(Kind.SET, number, pickle.dumps(changed), part.layout.filled(part.parameters)))

    def _pull_all(self, kind: str, unseen: bool = False, about: object = None) -> None:
        """Wait for all workers, then pull all values. Workers get the same values, because none steps before all have pulled."""
        for number, part in self._all_parts():
            self._push_changes(number, part)
        self._meet(kind, about)
        for number, part in self._all_parts():
            self._ask(part.server, Message(Kind.PULL, number), part.values)
            self._take(part, unseen)

    def _all_parts(self) -> Iterator[tuple[int, _Part]]:
        return ((number, part) for number, parts in self._parts.items() for part in parts)

    def _meet(self, kind: str, about: object = None) -> None:
        self._agree(kind, about, _different_parameters)

    # messages

    def _ask(self, server: int, message: Message, into: torch.Tensor | None = None) -> Message:
        self._send(server, message)
        return self._received(server, into)

    def _send(self, server: int, message: Message) -> None:
        try:
            self._group.connections.send(server, message)
        except RuntimeError as error:
            raise _ended(server) from error

    def _received(self, server: int, into: torch.Tensor | None = None) -> Message:
        try:
            message = self._group.connections.receive(server, into)
        except RuntimeError as error:
            raise _ended(server) from error
        if message.kind is Kind.FAILED:
            self._failed.add(server)
            raise LockstepError(message.content.decode())
        return message

    # evaluation and state

    def begins_pass(self, trains: bool) -> None:
        if not trains and not is_alone():
            self._evaluate()
            self.buffers.send_for_evaluation()

    def set_mode(self, module: nn.Module, training: bool) -> None:
        super().set_mode(module, training)
        if not training and not is_alone() and self.loop.optimizers.evaluate():
            self._evaluate()

    def _evaluate(self) -> None:
        """Give all workers the same weights before they evaluate."""
        if self._trained:
            self._trained = False
            self._pull_all("an evaluation")
            self._meet("training after an evaluation")

    def optimizer_state(self, optimizer: Optimizer, original: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the state dict, with the servers' state if they have ``optimizer``."""
        if optimizer not in self._numbers:
            return original()
        set_state(optimizer, self._state(optimizer))
        try:
            return original()
        finally:
            optimizer.state.clear()

    def _state(self, optimizer: Optimizer) -> dict[int, dict[str, Any]]:
        state: dict[int, dict[str, Any]] = {}
        number = self._numbers[optimizer]
        for part in self._parts[number]:
            state |= pickle.loads(self._ask(part.server, Message(Kind.STATE, number)).content)
        return state

    def load_optimizer_state(self, optimizer: Optimizer, original: Callable[[dict[str, Any]], None], state: dict[str, Any]) -> None:
        """Load ``state``; if the servers have ``optimizer``, load it there.

        Raises:
            UsageError: the servers have ``optimizer``, but only this rank runs the calling code.
        """
        number = self._numbers.get(optimizer)
        if number is not None and is_alone():
            raise UsageError(
                f"{script_place()} loads the state of a {type(optimizer).__name__}, which all workers send to its parameter servers "
                "together. But code inside @parwrap.rank_zero_only or rank_zero_first runs without the other ranks: read the file inside, "
                "and call load_state_dict() after that code, on all ranks."
            )
        original(state)
        if number is None:
            return
        self._meet("loading the state of an optimizer")
        if self._group.world.rank == 0:
            content = pickle.dumps((state_of(optimizer), self._options_of(optimizer)))
            for part in self._parts[number]:
                self._ask(part.server, Message(Kind.LOAD, number, content))
        self._meet("the state of an optimizer on its way to the servers")
        optimizer.state.clear()

    def moved(self, module: nn.Module) -> None:
        self._refuse_other_kinds(module.parameters())

    def _refuse_other_kinds(self, parameters: Iterable[torch.Tensor]) -> None:
        for p in parameters:
            known = self._known.get(p)
            if known is not None and (known.dtype, known.shape) != (p.dtype, p.shape):
                raise UsageError(
                    f"{script_place()} meets a parameter that is now {p.dtype} of shape {tuple(p.shape)}, but a parameter server holds it "
                    f"as {known.dtype} of shape {tuple(known.shape)}. Cast or resize the model before its first backward, or choose "
                    "another strategy."
                )

    # the end

    def end(self) -> None:
        """Give every worker the same final weights, and its optimizers the state that the servers have."""
        self._pull_all("the end of training")
        for optimizer in self._numbers:
            set_state(optimizer, self._state(optimizer))
        self._numbers.clear()
        self._last = Message(Kind.END)

    def make_whole(self) -> None:
        """On worker 0, prepare the last message to the servers: the result, and the state of the function's modules and optimizers."""
        if self._group.world.rank == 0:
            states = [each.state_dict() for each in self._first]
            self._last = Message(Kind.END, content=_pickled(states, self._group.call.result))

    def close(self) -> None:
        """Tell the servers that this worker has ended. Worker 0 adds the result, and a worker that has failed adds its error."""
        self.buffers.close()
        last, error = self._last, sys.exc_info()[1]
        if last.kind is Kind.FAILED and error is not None:
            last = last._replace(content=(in_one_line(error) if not isinstance(error, LockstepError) else str(error)).encode())
        for server in self._group.servers:
            if server not in self._failed:
                with suppress(RuntimeError):  # the server has ended
                    self._group.connections.send(server, last)
        self._parts.clear()


def _different_parameters(all_ranks: Sequence[Any]) -> RankMismatchError:
    return RankMismatchError(
        f"the workers train different parameters: {differing_parameter(all_ranks)}. Build the same models and optimizers on every rank."
    )


def _ended(server: int) -> LockstepError:
    return LockstepError(f"rank {server}, a parameter server, has ended: its own error says why.")


def _pickled(states: list[dict[str, Any]], result: Any) -> bytes:
    try:
        return pickle.dumps((states, result))
    except Exception as error:
        warn(
            f"parwrap: the result of the function cannot be pickled ({error}), so the function returns None on the parameter servers. "
            "Workers return the result. To return it on servers too, return numbers, tensors, or lists and dicts of these."
        )
        return pickle.dumps((states, None))
