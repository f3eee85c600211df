"""A parameter server, from its first backward on: receives the workers' messages, takes their steps and answers.

One thread for each worker receives its messages; everything else happens in the main thread, in the order of arrival. ``staleness.py``
decides who may continue, ``held_optimizer.py`` takes a step.
"""

from __future__ import annotations

import pickle
import queue
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from parwrap.decorator import EarlyExit
from parwrap.errors import RankMismatchError
from parwrap.intercept.backward import Backward
from parwrap.intercept.interceptor import Interceptor, intercepts
from parwrap.loop.loop_state import Loop, parameters_of
from parwrap.rank_zero.output import RankZeroOutput
from parwrap.rank_zero.private_files import PrivateFiles
from parwrap.strategies.parameter_server.final_state import take_over
from parwrap.strategies.parameter_server.held_optimizer import HeldOptimizer, Pushed
from parwrap.strategies.parameter_server.optimizer_transfer import set_options, unpacked
from parwrap.strategies.parameter_server.roles import Roles
from parwrap.strategies.parameter_server.staleness import Staleness
from parwrap.strategies.parameter_server.transport import Kind, Layout, Message, connection_failure
from parwrap.system.remote_exception import in_one_line

__all__ = ["Begun", "Served", "Server"]


class Served(EarlyExit):
    """Raised on a parameter server once all workers have finished: ends the user's function where it is, with worker 0's result.

    ``returns`` says whether that result could be sent.
    """


class Begun(NamedTuple):
    """A worker's message about an optimizer that the server steps from now on.

    Attributes:
        optimizer: the packed optimizer, or why it cannot be packed.
        kinds: the shape and dtype of each of its parameters.
        keys: the key of each parameter, the same in all optimizers that have the parameter.
        holders: the server that holds each parameter.
        options: the options of its groups.
    """

    optimizer: bytes | str
    kinds: list[tuple]
    keys: list[tuple[int, int]]
    holders: list[int]
    options: list[dict[str, Any]]


class Server(Interceptor):
    """Serves the workers of a run; the interceptor of backward in a server's own process.

    Args:
        roles: the ranks by role, connected.
        staleness: how many steps a worker may be ahead of the slowest.
        loop: the loop state of this process.
    """

    def __init__(self, roles: Roles, staleness: int | None, loop: Loop) -> None:
        workers = range(roles.workers)
        self._roles, self._transport, self._rank, self._loop = roles, roles.transport, roles.group.world.rank, loop
        self._place = self._rank - roles.workers  # among the servers
        self._staleness, self._there, self._lost = Staleness(workers, staleness), set(workers), set[int]()
        self._held: dict[int, HeldOptimizer] = {}
        self._parameters: dict[tuple[int, int], nn.Parameter] = {}
        self._pushed: dict[int, tuple[Message, Pushed | None]] = {}
        self._put: dict[str, bytes] = {}
        self._taking: dict[str, list[int]] = defaultdict(list)
        self._received: queue.SimpleQueue[tuple[int, Message]] = queue.SimpleQueue()
        self._stderr, self._served = sys.stderr, False
        for worker in workers:
            threading.Thread(target=self._read, args=(worker,), name=f"parwrap worker {worker}", daemon=True).start()

    @intercepts
    def backward(self, call: Backward) -> NoReturn:
        """Serve until all workers have ended, then end the user's function."""
        self.serve()
        served, result = Served(), pickle.loads(self._put["end"]).result
        if result is not None:
            served.result, served.returns = pickle.loads(result), True
        raise served

    @contextmanager
    def quiet(self) -> Iterator[list[Interceptor]]:
        """Yield the interceptors of this process. Inside the block it prints nothing, like every rank but 0."""
        output, files = RankZeroOutput(self._rank), PrivateFiles(self._rank)
        with output.silenced():
            try:
                yield [self, files, output]
            finally:
                files.close()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """Serve now, if the function has ended without a backward; report an error to the workers."""
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.serve()
        else:
            self.failed(error)

    def serve(self) -> None:
        """Serve until all workers have ended, and copy the final values."""
        while self._there:
            self._handle(*self._received.get())
        if "end" in self._put and not self._served:
            self._served = True
            take_over(self._loop, pickle.loads(self._put["end"]), states=True)

    def failed(self, error: BaseException) -> None:
        """Send the error of this server to all workers that have not ended."""
        text = f"rank {self._rank}, a parameter server, failed with {in_one_line(error)}."
        if isinstance(error, RankMismatchError):
            text = str(error)
        for worker in sorted(self._there):
            try:
                self._transport.send(worker, Message(Kind.FAILED, content=pickle.dumps(text)), waits=False)
            except RuntimeError:  # that worker has ended as well
                continue

    def _read(self, worker: int) -> None:
        kind = None
        try:
            while kind not in (Kind.END, Kind.FAILED):
                message = self._transport.receive(worker)
                kind = message.kind
                self._received.put((worker, message))
        except BaseException as error:
            self._received.put((worker, Message(Kind.FAILED, content=pickle.dumps(f"has died: {connection_failure(error)}"))))

    def _handle(self, worker: int, message: Message) -> None:
        staleness, answer = self._staleness, self._answer
        if message.kind is Kind.PUSH:
            self._pushed[worker] = message, message.object if message.content else None
            staleness.push(worker, message.optimizer, message.number, message.step)
        elif message.kind is Kind.WAIT:
            staleness.wait(worker, message.number, message.step)
        elif message.kind is Kind.GO_ON:
            staleness.go_on(worker)
        elif message.kind is Kind.SET:
            self._held[message.optimizer].set(message.object, message.values)  # type: ignore[arg-type]
        elif message.kind is Kind.PULL:
            answer(worker, values=self._held[message.optimizer].values())
        elif message.kind is Kind.STATE:
            answer(worker, self._held[message.optimizer].state())
        elif message.kind is Kind.LOAD:
            self._held[message.optimizer].load(*message.object)
        elif message.kind is Kind.BEGIN:
            self._begin(message.optimizer, message.object, message.values)  # type: ignore[arg-type]
            answer(worker)
        elif message.kind is Kind.DROP:
            self._drop(message.object)
        elif message.kind is Kind.PUT:
            topic, self._put[topic] = message.object[0], message.object[1]
            for waiting in self._taking.pop(topic, ()):
                self._give(waiting, topic)
        elif message.kind is Kind.TAKE:
            if message.object in self._put:
                self._give(worker, message.object)
            else:
                self._taking[message.object].append(worker)
        elif message.kind is Kind.END:
            self._there.discard(worker)
            staleness.end(worker)
        elif message.kind is Kind.FAILED:
            self._lose(worker, message.object)
        for due in staleness.released():
            self._step(due)

    def _step(self, workers: list[int]) -> None:
        several = [(worker, *self._pushed.pop(worker)) for worker in workers]
        held = self._held[several[0][1].optimizer]
        held.step([(worker, pushed, message.values, message.weight) for worker, message, pushed in several])
        for worker in workers:
            self._answer(worker, values=held.values())

    def _begin(self, number: int, begun: Begun, values: torch.Tensor) -> None:
        mine = [place for place, holder in enumerate(begun.holders) if holder == self._place]
        device = next((p.device for p in self._loop.once_owned().values()), torch.device("cpu"))
        shapes = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in (begun.kinds[place] for place in mine)]
        sent = Layout(shapes).views(values)
        parameters = [nn.Parameter(torch.empty(0, dtype=dtype, device=device), requires_grad=False) for _, dtype in begun.kinds]
        for place, value in zip(mine, sent, strict=True):
            known = self._parameters.get(begun.keys[place])
            if known is None:
                known = nn.Parameter(value.to(device, copy=True), requires_grad=value.is_floating_point() or value.is_complex())
            parameters[place] = self._parameters[begun.keys[place]] = known
        is_sent = isinstance(begun.optimizer, bytes)
        optimizer = unpacked(begun.optimizer, parameters) if is_sent else self._own(number, begun, parameters)  # type: ignore[arg-type]
        set_options(optimizer, begun.options)
        before = self._held.get(number)
        self._held[number] = HeldOptimizer(optimizer, mine, [parameters[place] for place in mine])
        if before is not None:  # the optimizer has got more parameters
            self._held[number].load({**self._held[number].state(), **before.state()}, begun.options)

    def _drop(self, numbers: set[int]) -> None:
        """Drop optimizers, and the parameters that no other optimizer has."""
        self._held = {number: held for number, held in self._held.items() if number not in numbers}
        left = {id(p) for held in self._held.values() for p in held.parameters}
        self._parameters = {key: p for key, p in self._parameters.items() if id(p) in left}

    def _own(self, number: int, begun: Begun, parameters: list[nn.Parameter]) -> Optimizer:
        """This process's own optimizer with that number, which must match the workers'; its parameters get new values."""
        optimizer = dict(self._loop.numbered_optimizers()).get(number)
        own = parameters_of(optimizer) if optimizer else []
        if optimizer is None or [(tuple(p.shape), p.dtype) for p in own] != begun.kinds:
            raise RankMismatchError(
                f"an optimizer cannot be sent to rank {self._rank}, a parameter server ({begun.optimizer!s}), which has not built the "
                "same optimizer itself. Define its class at the top level of a module, or build it before the first backward pass."
            )
        for place, p in enumerate(own):
            p.data = parameters[place].data
            parameters[place] = p  # type: ignore[call-overload]
            self._parameters[begun.keys[place]] = p  # type: ignore[assignment]
        return optimizer

    def _give(self, worker: int, topic: str) -> None:
        self._send(worker, Message(Kind.ANSWER, content=self._put[topic]))

    def _answer(self, worker: int, content: Any = None, values: torch.Tensor | None = None) -> None:
        self._send(worker, Message(Kind.ANSWER, content=b"" if content is None else pickle.dumps(content), values=values))

    def _send(self, worker: int, message: Message) -> None:
        try:
            self._transport.send(worker, message)
        except RuntimeError as error:  # the worker has died
            if worker not in self._lost:
                self._lose(worker, f"has died: {connection_failure(error)}")

    def _lose(self, worker: int, why: str) -> None:
        if worker not in self._there:
            return
        self._there.discard(worker)
        self._lost.add(worker)
        self._pushed.pop(worker, None)
        self._staleness.end(worker)
        text = f"rank {worker}, a worker of the parameter server, {why.rstrip('.')}."
        if not self._roles.survives or worker == 0 or not self._there:
            raise RankMismatchError(text)
        self._roles.report_lost(self._lost)
        if self._place == 0:
            print(f"parwrap: {text} The other workers continue training without it.", file=self._stderr, flush=True)
