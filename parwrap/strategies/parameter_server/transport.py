"""Messages between workers and parameter servers, over gloo's point-to-point calls: numbers, an object and a buffer of values.

Callers define their meaning. A call that waits for a dead process raises immediately. ``Layout`` places the values of several tensors in a
buffer.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch

from parwrap.errors import RankMismatchError

__all__ = ["Kind", "Layout", "Message", "Transport", "connection_failure"]

ALIGNED = 16
"""The alignment in bytes: each tensor of a buffer begins at a multiple of it, so that it can be viewed in its dtype."""


class Kind(IntEnum):
    """The purpose of a message; servers send only the last two."""

    BEGIN = 1
    """An optimizer with its parameters, to step from now on."""
    PUSH = 2
    """Gradients for one step; the answer has the new values."""
    SET = 3
    """Values that were changed by hand."""
    PULL = 4
    STATE = 5
    """Asks for the optimizer's state for the server's parameters."""
    LOAD = 6
    """The optimizer's state and options, to continue from."""
    WAIT = 7
    """The worker waits for others at sync point ``number``, or for a file that worker 0 writes after ``step``."""
    GO_ON = 8
    PUT = 9
    """An object for other workers, which ``TAKE`` it."""
    TAKE = 10
    END = 11
    DROP = 12
    """The numbers of optimizers that no worker has any longer."""
    ANSWER = 13
    FAILED = 14
    """The sender has failed; the content is the error text."""


class Message(NamedTuple):
    """A message.

    Attributes:
        kind: its purpose.
        optimizer: the number of its optimizer.
        number: the number of the worker's next sync point with other workers.
        weight: the weight of the gradients in an average.
        content: an object, pickled; empty for none.
        values: a buffer, or ``None``.
        step: the number of steps that the worker has asked for; with ``WAIT``, a step of worker 0.
    """

    kind: Kind
    optimizer: int = 0
    number: int = 0
    weight: float = 1.0
    content: bytes = b""
    values: torch.Tensor | None = None
    step: int = 0

    @property
    def object(self) -> Any:
        return pickle.loads(self.content)


class Transport:
    """The connections of this process with others.

    Args:
        process_group: torch's process group, with gloo.
        tag: separates these messages from those of other runs in the same processes.
    """

    def __init__(self, process_group: Any, tag: int) -> None:
        self._process_group, self._tag = process_group, tag
        self._left: list[Any] = []

    def send(self, rank: int, message: Message, waits: bool = True) -> None:
        """Send ``message`` to ``rank``; with ``waits``, return after the data is sent, so that values may change."""
        size = 0 if message.values is None else message.values.numel()
        head = [message.kind, message.optimizer, message.number, message.weight, len(message.content), size, message.step]
        works = [self._send(rank, torch.tensor(head, dtype=torch.float64))]
        if message.content:
            works.append(self._send(rank, torch.frombuffer(bytearray(message.content), dtype=torch.uint8)))
        if message.values is not None:
            works.append(self._send(rank, message.values))
        if not waits:
            self._left += works  # keeps tensors alive until they are sent
            return
        for _, work in works:
            work.wait()

    def receive(self, rank: int, into: torch.Tensor | None = None) -> Message:
        """The next message of ``rank``, with its values in the buffer ``into``, or in a new one."""
        head = torch.empty(7, dtype=torch.float64)
        self._receive(rank, head)
        kind, optimizer, number, weight, content, size, step = head.tolist()
        pickled = torch.empty(int(content), dtype=torch.uint8)
        if content:
            self._receive(rank, pickled)
        values = None
        if size:
            values = torch.empty(int(size), dtype=torch.uint8) if into is None else into
            self._receive(rank, values)
        return Message(Kind(int(kind)), int(optimizer), int(number), weight, pickled.numpy().tobytes(), values, int(step))

    def answer_of(self, server: int, into: torch.Tensor | None = None) -> Message:
        """The answer of ``server``.

        Raises:
            RankMismatchError: the server has died, or reports a failure.
        """
        try:
            message = self.receive(server, into)
        except RuntimeError as error:
            raise lost(server, error) from error
        if message.kind is Kind.FAILED:
            raise RankMismatchError(message.object)
        return message

    def ask(self, server: int, message: Message, into: torch.Tensor | None = None) -> Message:
        """Send ``message`` to ``server``, and return its answer."""
        try:
            self.send(server, message)
        except RuntimeError as error:
            raise lost(server, error) from error
        return self.answer_of(server, into)

    def _send(self, rank: int, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, self._process_group.send([tensor], rank, self._tag)

    def _receive(self, rank: int, tensor: torch.Tensor) -> None:
        self._process_group.recv([tensor], rank, self._tag).wait()


def lost(server: int, error: BaseException) -> RankMismatchError:
    """The error for a server that cannot be reached."""
    return RankMismatchError(f"rank {server}, a parameter server, has died: {connection_failure(error)}.")


def connection_failure(error: BaseException) -> str:
    """Why a connection has failed, in a few words."""
    text = str(error).partition("\n")[0]
    return "its connection was closed" if "closed by peer" in text or "reset by peer" in text else f"its connection failed with {text}"


class Layout:
    """The layout of tensors in a buffer.

    Args:
        tensors: tensors of any dtypes.

    >>> layout = Layout([torch.ones(3), torch.zeros(2, 2)])
    >>> [tuple(view.shape) for view in layout.views(layout.buffer())]
    [(3,), (2, 2)]
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._kinds, self.size = [], 0
        for tensor in tensors:
            end = self.size + tensor.numel() * tensor.element_size()
            self._kinds.append((self.size, end, tensor.dtype, tensor.shape))
            self.size = -(-end // ALIGNED) * ALIGNED

    def buffer(self) -> torch.Tensor:
        """A new buffer of zeros."""
        return torch.zeros(self.size, dtype=torch.uint8)

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Views of the tensors in ``buffer``."""
        return [buffer[begin:end].view(dtype).view(shape) for begin, end, dtype, shape in self._kinds]
