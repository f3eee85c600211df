"""A pass that may or may not train: this rank's share, and then, if nothing was trained, the rest of the dataset.

Most training passes have trained by the end of the share, so their batches are unchanged. The exception is a loss that is summed over the
whole pass before its backward pass.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from parwrap.data.unread import Unread
from parwrap.system.structures import tensors_in
from parwrap.torch_private.autograd import next_sequence_number, sequence_number

__all__ = ["ShareThenRest"]


class ShareThenRest:
    """The batches of a pass: first those of the ``share``.

    Args:
        share: this rank's batches.
        unread: the rest of the dataset; ``None`` if it cannot be read.
        trained: a function that returns a number, which changes whenever something is trained.
        looks: a function, called when the share ends without training, with the number of batches read and whether a loss waits for a
            backward pass; returns the rest, or ``None`` if the pass trains after all.
        shown: a function, called once, when something was trained, with the number of batches read until then and whether the share had
            ended.

    Attributes:
        read: the number of batches of the share that the loop has read.
        trains: whether the pass is known to train.
        looked: whether the pass is known not to train.
    """

    def __init__(
        self,
        share: Iterator,
        unread: Unread | None,
        trained: Callable[[], int],
        looks: Callable[[int, bool], Iterator | None],
        shown: Callable[[int, bool], None],
    ) -> None:
        self._share, self._unread = share, unread
        self._trained, self._looks, self._shown = trained, looks, shown
        self.read = self._before = 0
        self._first_tensor: weakref.ref[torch.Tensor] | None = None
        self._first: tuple[int, int] | None = None
        self._rest: Iterator | None = None
        self.trains = self.looked = False

    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> Any:
        if self.trains and not self.looked:
            return next(self._share)
        if not self.read:
            self._before = self._trained()
        if self._trained() != self._before:
            self._show()
            return self.__next__()
        if self._rest is not None:
            return next(self._rest)
        self._note_graph()
        try:
            batch = next(self._share)
        except StopIteration:
            if not self.read or not self._ask():
                raise
            return next(self._rest)  # type: ignore[call-overload]
        if self._unread is not None and self._unread.uneven_after(self.read + 1) and self._ask():
            return next(self._rest)  # type: ignore[call-overload]
        self.read += 1
        if self.read == 1 and (tensor := next(tensors_in(batch), None)) is not None:
            self._first_tensor = weakref.ref(tensor)
        return batch

    def __len__(self) -> int:
        return len(self._share)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._share, name)

    def show_training(self) -> None:
        """Record that the loop is about to train on the batch it has read last."""
        if not self.trains:
            self._show()

    def first_waits(self) -> bool:
        """Whether a result of the first batch still waits for a backward pass. If it is the only batch, the loop's variables show this."""
        return self._first is not None and self.read > 1 and _alive(*self._first) and gc.collect() >= 0 and _alive(*self._first)

    def kept(self) -> bool:
        """Whether the script has kept the first batch, so that it may have kept all batches."""
        return self.read > 1 and self._first_tensor is not None and self._first_tensor() is not None

    def undecided(self) -> bool:
        """Whether the purpose of the pass is still unknown, and batches were read without training."""
        return self.read > 0 and not (self.trains or self.looked) and self._trained() == self._before

    def _show(self) -> None:
        self.trains = True
        self._shown(self.read, self.looked)
        if self.looked:
            self._share, self.looked = iter(()), False
        elif self._unread is not None:
            self._unread.forget()

    def _ask(self) -> bool:
        """Ask whether the pass reads data without training. If so, the rest of the data comes next."""
        self._rest = self._looks(self.read, self.first_waits())
        self.looked, self.trains = self._rest is not None, self._rest is None
        if self._unread is not None:
            self._unread.forget()
        return self.looked

    def _note_graph(self) -> None:
        """Remember the sequence numbers of the graph nodes that were built from the first batch."""
        if self.read == 0:
            self._first = (next_sequence_number(), -1)
        elif self.read == 1 and self._first is not None:
            self._first = (self._first[0], next_sequence_number())


def _alive(begin: int, end: int) -> bool:
    """Whether a tensor's graph contains a node with one of these sequence numbers."""
    tensors = (thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))
    waiting: list[Any] = [node for tensor in tensors if (node := tensor.grad_fn) is not None]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node in seen or (number := sequence_number(node)) is None:
            continue
        seen.add(node)
        if begin <= number < end:
            return True
        if number > begin:  # older nodes never lead to newer ones
            waiting += [each for each, _ in node.next_functions if each is not None]
    return False
