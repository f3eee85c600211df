"""A parameter server: it holds weights and the state of optimizers, and steps with the gradients that workers push.

A worker asks, and the server answers, in one thread for each worker; only one thread steps at a time. The server's process runs the script
up to the first backward, so that it knows the classes of the script's optimizers. ``parameter_server.py`` is the side of the workers.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import IntEnum
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from parwrap.errors import LockstepError, in_one_line
from parwrap.intercept.intercepted_calls import Backward
from parwrap.intercept.interceptor import Interceptor
from parwrap.loop.optimizers import parameters_of
from parwrap.torch_private.optimizer import global_post_hooks, global_pre_hooks

__all__ = ["Begun", "Connections", "Kind", "Layout", "Message", "Pushed", "Served", "Server", "may_step", "packed", "set_state", "state_of"]

# messages

ALIGNED = 16
"""Each tensor of a buffer begins at a multiple of this number of bytes, so that it can be viewed in its dtype."""


class Kind(IntEnum):
    """What a worker asks for. An answer has the same kind, or is ``FAILED`` with a text."""

    FAILED = 0
    """The worker has ended with an error. In an answer: the server, or any worker, has failed. The content is the error's text."""
    BEGIN = 1
    """An optimizer and its parameters, to step from now on."""
    PUSH = 2
    """Gradients for one step; the answer has the new values."""
    SET = 3
    """Values that the script has changed by hand."""
    PULL = 4
    """A request for the present values."""
    STATE = 5
    """A request for the optimizer's state for the parameters of this server."""
    LOAD = 6
    """A state from which the optimizer continues."""
    END = 7
    """The worker has ended; the message of worker 0 has the result for the servers."""


class Message(NamedTuple):
    """A message between a worker and a server.

    Attributes:
        kind: what the worker asks for; in an answer, the same or ``FAILED``.
        optimizer: the number of the optimizer that the worker asks about.
        content: a pickled object or a text; empty if there is none.
        values: a buffer of values or gradients, if there are any.
    """

    kind: Kind
    optimizer: int = 0
    content: bytes = b""
    values: torch.Tensor | None = None


class Connections:
    """Sends and receives messages between workers and servers.

    Args:
        process_group: a gloo group of all ranks, which nothing else uses.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._group = process_group

    def send(self, rank: int, message: Message) -> None:
        values = torch.empty(0, dtype=torch.uint8) if message.values is None else message.values
        parts = [torch.tensor([message.kind, message.optimizer, len(message.content), len(values)])]
        if message.content:
            parts.append(torch.frombuffer(bytearray(message.content), dtype=torch.uint8))
        if len(values):
            parts.append(values)
        for work in [self._group.send([part], rank, 0) for part in parts]:
            work.wait()

    def receive(self, rank: int, into: torch.Tensor | None = None) -> Message:
        """Receive the next message of ``rank``, with its values in the buffer ``into``, or in a new buffer.

        Raises:
            RuntimeError: the process of ``rank`` has ended.
        """
        head = torch.empty(4, dtype=torch.int64)
        self._group.recv([head], rank, 0).wait()
        kind, optimizer, length, size = head.tolist()
        content = torch.empty(length, dtype=torch.uint8)
        if length:
            self._group.recv([content], rank, 0).wait()
        values = torch.empty(size, dtype=torch.uint8) if into is None or not size else into
        if size:
            self._group.recv([values], rank, 0).wait()
        return Message(Kind(kind), optimizer, content.numpy().tobytes(), values)


class Layout:
    """The places of tensors in a buffer of bytes.

    >>> layout = Layout([torch.ones(3), torch.zeros(2, 2)])
    >>> [tuple(view.shape) for view in layout.views(layout.buffer())]
    [(3,), (2, 2)]
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._kinds, self._size = [], 0
        for tensor in tensors:
            end = self._size + tensor.numel() * tensor.element_size()
            self._kinds.append((self._size, end, tensor.dtype, tensor.shape))
            self._size = -(-end // ALIGNED) * ALIGNED

    def buffer(self) -> torch.Tensor:
        """A new buffer of zeros, with room for all tensors."""
        return torch.zeros(self._size, dtype=torch.uint8)

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """For each tensor, the part of ``buffer`` that holds its values, viewed in its dtype and shape."""
        return [buffer[begin:end].view(dtype).view(shape) for begin, end, dtype, shape in self._kinds]

    def filled(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """A new buffer with the values of ``tensors``, which have the shapes of this layout."""
        buffer = self.buffer()
        for view, tensor in zip(self.views(buffer), tensors, strict=True):
            view.copy_(tensor.detach())
        return buffer


class Begun(NamedTuple):
    """The content of a ``BEGIN`` message: an optimizer that servers step from now on.

    Attributes:
        optimizer: the optimizer, :func:`packed`.
        kinds: the shape, dtype and kind of device of each of its parameters.
        keys: the number of each parameter; a parameter has the same number in all optimizers.
        holders: the index of the server that holds each parameter; the first server is 0.
        options: the options of the optimizer's groups.
        alive: the numbers of all optimizers that are still used.
    """

    optimizer: bytes
    kinds: list[tuple[torch.Size, torch.dtype, str]]
    keys: list[int]
    holders: list[int]
    options: list[dict[str, Any]]
    alive: set[int]


class Pushed(NamedTuple):
    """The content of a ``PUSH`` message, besides the buffer of dense gradients.

    Attributes:
        dense: the places of the parameters with a dense gradient, among the server's parameters of the optimizer.
        sparse: the indices, values and shapes of sparse gradients, by place.
        options: the options of the optimizer's groups.
        left_out: whether the worker leaves the step out, because its gradients are not finite.
    """

    dense: list[int]
    sparse: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Size]]
    options: list[dict[str, Any]]
    left_out: bool


# sending optimizers: the script's object, with other tensors in place of its parameters


def packed(optimizer: Optimizer) -> bytes:
    """Pickle ``optimizer`` without its parameters' values, its hooks, and the wrappers that schedulers put around its step.

    Raises:
        Exception: the error of pickle for an object that cannot be pickled, such as a lambda in an attribute.
    """
    place_of = {id(p): place for place, p in enumerate(parameters_of(optimizer))}

    class Pickler(pickle.Pickler):
        def persistent_id(self, thing: Any) -> Any:
            return place_of.get(id(thing))

    plain = {name: value for name, value in vars(optimizer).items() if not (name == "step" or "hook" in name)}
    stream = io.BytesIO()
    Pickler(stream).dump((type(optimizer), plain))
    return stream.getvalue()


def _unpacked(sent: bytes, parameters: Sequence[torch.Tensor]) -> Optimizer:
    class Unpickler(pickle.Unpickler):
        def persistent_load(self, place: int) -> torch.Tensor:
            return parameters[place]

    kind, plain = Unpickler(io.BytesIO(sent)).load()
    optimizer = object.__new__(kind)
    optimizer.__setstate__(plain)
    return optimizer


def state_of(optimizer: Optimizer, places: Sequence[int] | None = None) -> dict[int, dict[str, Any]]:
    """The state of ``optimizer`` for the parameters at ``places``, by place; by default for all parameters."""
    states = {place: optimizer.state.get(p) for place, p in enumerate(parameters_of(optimizer))}
    return {place: state for place, state in states.items() if state and (places is None or place in places)}


def set_state(optimizer: Optimizer, state: dict[int, dict[str, Any]], places: Sequence[int] | None = None) -> None:
    """Make ``optimizer`` continue from ``state`` for the parameters at ``places``; by default for all parameters."""
    for place, p in enumerate(parameters_of(optimizer)):
        if places is None or place in places:
            optimizer.state.pop(p, None)
            if place in state:
                optimizer.state[p] = {name: _on_device_of(value, p) for name, value in state[place].items()}


def _on_device_of(value: Any, parameter: torch.Tensor) -> Any:
    """``value`` on the device of ``parameter``; scalars, such as counters, stay on the CPU."""
    return value.to(parameter.device) if isinstance(value, torch.Tensor) and value.dim() else value


class _Held:
    """The part of an optimizer that a server holds.

    Args:
        optimizer: the script's optimizer, in which the parameters of other servers are empty.
        places: the places of the server's own parameters.

    Attributes:
        parameters: the server's own parameters.
    """

    def __init__(self, optimizer: Optimizer, places: Sequence[int]) -> None:
        self._optimizer, self._places = optimizer, places
        parameters = list(parameters_of(optimizer))
        self.parameters = [parameters[place] for place in places]
        self._layout = Layout(self.parameters)
        for place, p in enumerate(parameters):
            if place not in places:
                optimizer.state.pop(p, None)
        self.load(self.state(), [])

    def values(self) -> torch.Tensor:
        return self._layout.filled(self.parameters)

    def set(self, places: Sequence[int], buffer: torch.Tensor) -> None:
        views = self._layout.views(buffer)
        for place in places:
            self.parameters[place].data.copy_(views[place])

    def step(self, pushes: Sequence[Message]) -> None:
        """Step once with the average of the workers' gradients; a worker without a gradient counts as zero.

        If one worker leaves the step out, the server does not step: an average with its gradients would not be finite.
        """
        sums: dict[int, torch.Tensor] = {}
        for message in pushes:
            pushed: Pushed = pickle.loads(message.content)
            self.set_options(pushed.options)
            if pushed.left_out:
                return
            assert message.values is not None
            views = self._layout.views(message.values) if pushed.dense else []
            found = {place: views[place] for place in pushed.dense}
            found |= {place: torch.sparse_coo_tensor(*parts, check_invariants=False) for place, parts in pushed.sparse.items()}
            for place, gradient in found.items():
                sums[place] = sums[place] + gradient if place in sums else gradient
        for place, p in enumerate(self.parameters):
            p.grad = (sums[place] / len(pushes)).to(p.device) if place in sums else None
        with _unobserved():
            self._optimizer.step()

    def state(self) -> dict[int, dict[str, Any]]:
        return state_of(self._optimizer, self._places)

    def state_of(self, parameter: torch.Tensor) -> dict[str, Any] | None:
        return self._optimizer.state.get(parameter)

    def load(self, state: dict[int, dict[str, Any]], options: list[dict[str, Any]]) -> None:
        self.set_options(options)
        set_state(self._optimizer, state, self._places)

    def set_options(self, options: list[dict[str, Any]]) -> None:
        for group, given in zip(self._optimizer.param_groups, options, strict=False):
            group.update(given)


@contextmanager
def _unobserved() -> Iterator[None]:
    """Turn global optimizer hooks off inside the block, where the server steps: they are for steps of the script."""
    hooks = (global_pre_hooks, global_post_hooks)
    before = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
    try:
        yield
    finally:
        for each, kept in zip(hooks, before, strict=True):
            each.update(kept)


# the server


def may_step(steps: Mapping[int, int], worker: int, staleness: int | None) -> bool:
    """Whether ``worker`` may take the step that it has asked for.

    Args:
        steps: the number of steps that each worker has asked for, without workers that have ended.
        worker: the number of the worker.
        staleness: how many steps a worker may be ahead of the slowest; ``None`` for any number.

    >>> [may_step({0: asked, 1: 3}, 0, staleness=2) for asked in (4, 5, 6)]
    [True, True, False]
    """
    return staleness is None or steps[worker] <= min(steps.values()) + staleness


class Served(SystemExit):
    """Ends the script's function on a server once all workers have ended. It is no failure, and no ``except Exception`` catches it."""


class Server(Interceptor):
    """Serves the workers when the script's first backward runs on this rank.

    Args:
        connections: the connections to the workers.
        workers: the number of workers, which are the first ranks.
        rank: this rank.
        staleness: how many steps a worker may be ahead of the slowest; 0: workers step together; ``None``: each at its own pace.
        device: the device for parameters that workers have on a GPU.

    Attributes:
        result: the pickled content of the last message of worker 0.
    """

    def __init__(self, connections: Connections, workers: int, rank: int, staleness: int | None, device: torch.device) -> None:
        self._connections, self._workers, self._rank, self._staleness, self._device = connections, workers, rank, staleness, device
        self._held: dict[int, _Held] = {}
        self._parameters: dict[int, nn.Parameter] = {}
        self._changed = threading.Condition()
        self._steps = dict.fromkeys(range(workers), 0)  # asked for by each worker that has not ended
        self._together: dict[int, Message] = {}
        self._rounds = 0
        self._error: BaseException | None = None
        self.result = b""

    def backward(self, call: Backward) -> NoReturn:
        self.serve()
        raise Served

    def serve(self) -> None:
        """Serve until all workers have ended. Return at once if they have ended already.

        Raises:
            LockstepError: a worker has failed.
            Exception: a step of the script's optimizer has raised.
        """
        threads = [threading.Thread(target=self._serve, args=(worker,), daemon=True) for worker in list(self._steps)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def _serve(self, worker: int) -> None:
        """Answer ``worker`` until it ends. If the server or any worker has failed, the answer is that failure."""
        while True:
            try:
                message = self._connections.receive(worker)
            except RuntimeError:
                message = Message(Kind.FAILED)
            try:
                with self._changed:
                    answer = self._handled(worker, message)
            except BaseException as error:
                with self._changed:
                    self._error = self._error or error
                    self._changed.notify_all()
                text = str(self._error)
                if not isinstance(self._error, LockstepError):
                    text = f"rank {self._rank}, a parameter server, has failed with {in_one_line(self._error)}."
                answer = Message(Kind.FAILED, content=text.encode())
            if message.kind in (Kind.END, Kind.FAILED):  # the worker waits for no answer
                return
            with suppress(RuntimeError):  # the worker has ended, which the next receive finds
                self._connections.send(worker, answer)
            if answer.kind is Kind.FAILED:
                return

    def _handled(self, worker: int, message: Message) -> Message:
        """Do what ``message`` asks for, and return the answer."""
        number, answer = message.optimizer, Message(message.kind)
        if message.kind is Kind.END:
            self.result = message.content or self.result
            del self._steps[worker]
            self._changed.notify_all()
        elif self._error is not None:
            raise self._error
        elif message.kind is Kind.FAILED:
            why = f" with {text}" if (text := message.content.decode()) else ": its own error says why."
            raise LockstepError(f"rank {worker}, a worker of the parameter server, has ended{why}")
        elif message.kind is Kind.PUSH:
            self._push(worker, message)
            answer = answer._replace(values=self._held[number].values())
        elif message.kind is Kind.PULL:
            answer = answer._replace(values=self._held[number].values())
        elif message.kind is Kind.STATE:
            answer = answer._replace(content=pickle.dumps(self._held[number].state()))
        elif message.kind is Kind.SET:
            assert message.values is not None
            self._held[number].set(pickle.loads(message.content), message.values)
        elif message.kind is Kind.LOAD:
            self._held[number].load(*pickle.loads(message.content))
        elif message.kind is Kind.BEGIN:
            assert message.values is not None
            self._begin(number, pickle.loads(message.content), message.values)
        return answer

    def _push(self, worker: int, message: Message) -> None:
        """Wait until ``worker`` may step, then step with its gradients."""
        self._steps[worker] += 1
        if self._staleness == 0:
            self._push_together(worker, message)
            return
        self._changed.notify_all()
        self._wait(lambda: may_step(self._steps, worker, self._staleness))
        self._held[message.optimizer].step([message])

    def _push_together(self, worker: int, message: Message) -> None:
        self._together[worker] = message
        if len({each.optimizer for each in self._together.values()}) > 1:
            steps = ", ".join(f"rank {rank} is in a step of optimizer {each.optimizer}" for rank, each in self._together.items())
            raise LockstepError(f"the workers have come apart: {steps}. With staleness=0 all workers must step in the same order.")
        if len(self._together) < self._workers:
            this = self._rounds
            self._wait(lambda: self._rounds > this)
            return
        self._held[message.optimizer].step([each for _, each in sorted(self._together.items())])
        self._together.clear()
        self._rounds += 1
        self._changed.notify_all()

    def _wait(self, until: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._error is not None or until())
        if self._error is not None:
            raise self._error

    def _begin(self, number: int, begun: Begun, values: torch.Tensor) -> None:
        """Hold this server's part of a new optimizer. Parameters that the server holds already keep their values."""
        own = [place for place, holder in enumerate(begun.holders) if holder == self._rank - self._workers]
        sent = Layout([torch.empty(shape, dtype=dtype, device="meta") for shape, dtype, _ in (begun.kinds[place] for place in own)])
        parameters = [nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False) for _, dtype, _ in begun.kinds]
        for place, value in zip(own, sent.views(values), strict=True):
            key, device = begun.keys[place], torch.device("cpu") if begun.kinds[place][2] == "cpu" else self._device
            if key not in self._parameters:
                trains = value.is_floating_point() or value.is_complex()
                self._parameters[key] = nn.Parameter(value.to(device, copy=True), requires_grad=trains)
            parameters[place] = self._parameters[key]
        held = _Held(_unpacked(begun.optimizer, parameters), own)
        state = held.state()
        if number in self._held:  # it has got other parameters
            state |= {place: kept for place in own if (kept := self._held[number].state_of(parameters[place]))}
        held.load(state, begun.options)
        self._held = {each: kept for each, kept in self._held.items() if each in begun.alive} | {number: held}
        left = {id(p) for each in self._held.values() for p in each.parameters}
        self._parameters = {key: p for key, p in self._parameters.items() if id(p) in left}
