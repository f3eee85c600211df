"""The check that all ranks are at the same step: on a node by the pages, across nodes by numbers that travel with the gradients.

``Entry`` is the layout of the signal, the small parameter that a gradient averager averages beside those of the script.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import cast
from zlib import crc32

import torch

from parwrap.checks.positions import Positions, State
from parwrap.checks.same_data import different_data
from parwrap.checks.same_work import SameWork
from parwrap.errors import LockstepError, RankMismatchError
from parwrap.loop.interrupts import Interrupts
from parwrap.loop.one_pass import Pass
from parwrap.loop.passes import DIGITS, Passes
from parwrap.places import Place, script_place
from parwrap.ranks.device import to_host
from parwrap.ranks.group import Group, is_alone
from parwrap.torch_private.autograd import in_backward

__all__ = ["GROWS", "LOSS", "LOSS_LOW", "NUMBERS", "Entry", "Exchange", "SameStep"]

TOLERANCE = 0.25
"""How far the mean of equal digits may be off by rounding."""

VARIANCE = 0.01
"""How far the variance of equal digits of ``random`` may be off by rounding."""

LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""What gloo says of a rank that has ended."""


class Entry(IntEnum):
    """The last entries of the signal. Before them it has a bit for each parameter: whether this rank's loss reaches it."""

    SET = -18
    """The number of the set of parameters, modulo ``DIGITS``."""
    STEP = -17
    """The number of earlier backwards in this training pass, or in the scope if none is open, modulo ``DIGITS``."""
    DRAWN = -16
    """The number of batches that the loop has drawn in this training pass, or in the scope if none is open, modulo ``DIGITS``."""
    DATA = -15
    """Eight digits of what all ranks must read alike, in a pass's first backward."""
    WEIGHT = -7
    """The weight of this rank's part of the batch; the mean is 1."""
    PYTHON = -6
    """A digit of the state of Python's ``random``, once this rank has read a training batch; 0 if it is not sent. It takes a third of what
    a small backward costs, so it is sent in the first 8 backwards of a pass and in each 8th, and in all once the loop draws from it."""
    PYTHON_SQUARED = -5
    """The square of it: from both means each rank computes whether any two ranks differ, and all find the same."""
    LOSS = -4
    """The loss, in the signal's precision."""
    LOSS_LOW = -3
    """The rest of a float64 loss, which the signal's precision cuts off."""
    GROWS = -2
    """Whether a parameter outside of every set has got a gradient."""
    INTERRUPTED = -1
    """Whether this rank holds a signal to end, such as Ctrl-C."""


SET, STEP, DRAWN, DATA, WEIGHT, PYTHON, PYTHON_SQUARED, LOSS, LOSS_LOW, GROWS, INTERRUPTED = map(int, Entry)  # each step indexes with these
NUMBERS = -SET
ALIKE = range(SET, WEIGHT)
"""The entries that are equal on all ranks."""


@dataclass(slots=True, eq=False)
class Exchange:
    """What the ranks tell each other with the gradients of one backward.

    Attributes:
        place: the line of the backward.
        training: the innermost training pass, if any.
        sent: this rank's numbers, indexed by :class:`Entry`. The averager fills in those of the loss.
        loss: the scalar to send, multiplied by the weight of this rank's part of the batch; ``None`` if the call has no such scalar.
        means: the means over ranks, once they are averaged: on a GPU a tensor of shape ``(NUMBERS,)``, which may still be on its way.
        arrived: on a GPU, an event after which ``means`` are on the host.
    """

    place: Place
    training: Pass | None
    sent: list[float]
    loss: torch.Tensor | None
    means: list[float] | torch.Tensor = field(default_factory=list)
    arrived: torch.Event | None = None


class SameStep:
    """Compares the step of this rank with those of the others, before and after each exchange.

    Args:
        group: the process group.
        passes: the passes over loaders.
        work: compares the losses of the ranks.
        interrupts: the signals that this rank holds.

    Attributes:
        work: compares the losses of the ranks.
        ending: whether this rank's function has ended.
    """

    def __init__(self, group: Group, passes: Passes, work: SameWork, interrupts: Interrupts) -> None:
        self._passes, self.work, self._interrupts = passes, work, interrupts
        self.ending = self._drew_apart = self._draws_apart = self._draws_python = False
        self._python = 0.0  # the last mean of the ranks' digits of Python's random in this pass
        self._averages_since = 0.0  # when this rank's last backward began to wait for the averages
        self._last: str | Place = "its start"
        assert group.folder is not None
        ranks = group.world.node_ranks
        self._group, self._world = group, group.world
        self.positions = Positions(group.folder, ranks.index(group.world.rank), ranks, lambda: not interrupts.raised)
        self._on_the_way: deque[Exchange] = deque()

    @contextmanager
    def control(self, kind: str) -> Iterator[Callable[[], None]]:
        """Say that this rank sends a control message of that ``kind`` inside the block.

        Yields:
            a function that raises the errors below. Call it now and then while this rank waits for a message that no collective sends.

        Raises:
            LockstepError: another rank can never meet this one there, or has ended.
        """
        if in_backward():  # on a GPU, in a thread that has no line of the script
            with self.positions.inner(crc32(kind.encode()), f"{kind} in the backward at {self._last}"):
                yield self.positions.compare
            return
        self.sends(kind)
        try:
            yield self.positions.compare
        except RuntimeError as error:
            self.explain(error)
            raise
        self.positions.run()

    def sends(self, kind: str) -> None:
        """Say that this rank is about to send a message of that ``kind``. Unlike :meth:`control`, never say that the message is through.

        Raises:
            LockstepError: another rank can never meet this one there, or has ended.
        """
        place = f"its end, after {self._last}" if self.ending else script_place()
        self.positions.done = self._passes.done
        self.positions.enter(State.CONTROL, crc32(kind.encode()), f"{kind} at {place}")

    def begin(self, number: int, weight: float, place: Place, shown: str, loss: torch.Tensor | None) -> Exchange:
        """Say that this rank is about to average gradients in a backward.

        Args:
            number: identifies the set of parameters on all ranks.
            weight: the weight of this rank's part of the batch.
            place: the line of the backward.
            shown: the line as errors show it.
            loss: the scalar to send, multiplied by its weight.

        Returns:
            What this rank sends with the gradients.

        Raises:
            LockstepError: another rank can never meet this one there.
        """
        passes = self._passes
        numbers = [0.0] * NUMBERS
        numbers[SET] = number % DIGITS
        backwards, drawn = passes.progress
        numbers[STEP], numbers[DRAWN] = backwards % DIGITS, drawn % DIGITS
        numbers[WEIGHT] = weight
        numbers[INTERRUPTED] = float(self._interrupts.held is not None)
        if (self._draws_python or backwards < 8 or not backwards % 8) and passes.batches:
            passes.streams.write_python(numbers, PYTHON, PYTHON_SQUARED)
        if passes.unsent and (data := passes.data_to_send()):
            numbers[DATA:WEIGHT] = data
        self.meets(number, shown)
        return Exchange(place, passes.training, numbers, loss)

    def meets(self, number: int, place: str) -> None:
        """Say that this rank is about to meet the others at the line ``place``, to average the gradients of set ``number``.

        Raises:
            LockstepError: another rank can never meet this one there.
        """
        self._last = place
        self.positions.done = self._passes.done
        self.positions.enter(State.BACKWARD, number, place)

    def averages(self) -> None:
        """Say that this rank's backward has reached its end, and waits for the average gradients.

        Raises:
            LockstepError: another rank can never meet this one there, such as one that waits inside of the backward for a message.
        """
        self._averages_since = time.perf_counter()
        self.positions.averages()

    def finish(self, exchange: Exchange) -> bool:
        """Say that this rank has the averages, and compare what the ranks have sent with them.

        On a GPU, this compares what they have sent in the backward before, to not wait for the GPU.

        Returns:
            Whether a rank has got a gradient for a parameter that no set has.

        Raises:
            LockstepError: the ranks were in different steps.
            RankMismatchError: they read different data, or their weights do not add up.
        """
        self.positions.run()
        if isinstance(exchange.means, list):
            self._passes.clock.averages += time.perf_counter() - self._averages_since
            grows = self._compare(exchange)
        else:
            grows = self._compare_later(exchange)
        if self._passes.unsent:
            self._passes.data_sent()
        if self._drew_apart:
            self._share_python()
        return grows

    def begins_pass(self) -> None:
        """Let ranks draw the order of a pass alike: on a GPU, the numbers of the last backward may be on their way."""
        self._python = 0.0
        if self._draws_apart and not is_alone():
            self.catch_up()
            if self._drew_apart:
                self._share_python()

    def _share_python(self) -> None:
        self._drew_apart, self._draws_apart = False, True
        self._passes.streams.share_python(self._group)

    def passed(self, place: str | Place) -> None:
        """Note that training has come to ``place``: errors name it as the last step of a rank that ends after it."""
        self._last = place

    def explain(self, error: RuntimeError) -> None:
        """Raise an error that says where all ranks are, if ``error`` says that another rank's connection has closed.

        Raises:
            LockstepError: another rank's connection has closed.
        """
        if any(text in str(error) for text in LOST):
            raise self.positions.error("the connection to another rank has closed") from error

    def _compare_later(self, exchange: Exchange) -> bool:
        """Begin to copy the means of ``exchange`` to the host, and compare those of the backward before."""
        means, loss, training = cast(torch.Tensor, exchange.means), exchange.loss, exchange.training
        if loss is not None and (training is None or not training.shared) and self.work.watches(exchange.place):
            means = torch.cat((means, loss.detach().reshape(1).to(means.dtype)))
        copied, event = to_host(means)
        self._on_the_way.append(replace(exchange, means=copied, loss=None, arrived=event))
        return self._compare_arrived() if len(self._on_the_way) > 1 else False

    def _compare_arrived(self) -> bool:
        before = self._on_the_way.popleft()
        cast(torch.Event, before.arrived).synchronize()
        before.means = means = cast(torch.Tensor, before.means).tolist()
        if len(means) > NUMBERS:
            before.sent[LOSS] = means.pop()
        return self._compare(before)

    def catch_up(self) -> None:
        """Compare the numbers that are still on their way from the GPU."""
        while self._on_the_way:
            self._compare_arrived()

    def end(self) -> None:
        """Note that this rank's function has ended, and compare the last numbers."""
        self.ending, self.positions.done = True, self._passes.done
        if (empty := self._passes.empty_at) is not None:
            self.positions.add_to_place(f", and its training pass at {empty} had no batch")
        self.catch_up()

    def _compare(self, exchange: Exchange) -> bool:
        mine, means, place, training = exchange.sent, cast(list[float], exchange.means), exchange.place, exchange.training
        if means[:WEIGHT] != mine[:WEIGHT]:
            self._compare_digits(mine, means, place, training)
        if abs(means[WEIGHT] - 1) > 1e-3:
            raise RankMismatchError(
                f"the ranks train on parts of different batches in the backward at {place}. A rank's weight is its share of the samples of "
                "the batch, times the number of ranks. The weights for one batch have a mean of 1 over the ranks, but here the mean is "
                f"{means[WEIGHT]:.4g}. Draw and train on the same batches in the same order on every rank."
            )
        if training is not None:
            training.losses += means[LOSS] + means[LOSS_LOW]
        if means[PYTHON]:
            self._drew_apart |= means[PYTHON_SQUARED] - means[PYTHON] ** 2 > VARIANCE
            self._draws_python |= self._python not in (0, means[PYTHON])
            self._python = means[PYTHON]
        if means[INTERRUPTED] > 0:
            self._interrupts.release()
        if (training is None or not training.shared) and self.work.watches(place):
            self.work.compare(place, mine[LOSS], means[LOSS])
        return means[GROWS] > 0

    def _compare_digits(self, mine: list[float], means: list[float], place: Place, training: Pass | None) -> None:
        """Raise the error for digits that differ between ranks by more than rounding."""
        differ = [index for index in ALIKE if abs(means[index] - mine[index]) > TOLERANCE]
        if not differ:
            return
        if differ[0] in (SET, STEP):
            raise self.positions.error(self._steps_apart(mine[STEP], means[STEP], training))
        if differ[0] == DRAWN:
            raise self._skipped(mine, means, place, training)
        different_data({(index - DATA) // 2 for index in differ}, training.place if training else place, self._passes.around)

    def _steps_apart(self, mine: float, mean: float, training: Pass | None) -> str:
        """Words for an error: in which backward this rank is, and in which the others are. Pages may show the same line for all."""
        rank, size = self._world.rank, self._world.size
        others = (
            f"the other rank in backward {2 * mean - mine + 1:.0f}" if size == 2 else f"the ranks on average in backward {mean + 1:.4g}"
        )
        where = f"its pass over the loader at {training.place}" if training else "the script"
        apart = "" if abs(mean - mine) <= TOLERANCE else f" (rank {rank} is in backward {mine + 1:.0f} of {where}, {others})"
        return f"their gradients belong to different steps{apart}"

    def _skipped(self, mine: list[float], means: list[float], place: Place, training: Pass | None) -> LockstepError:
        rank, size = self._world.rank, self._world.size
        drawn, mean, step = mine[DRAWN], means[DRAWN], mine[STEP] + 1
        where = " of its pass" if training else ""
        others = f"the other rank {2 * mean - drawn:.0f}" if size == 2 else f"the ranks {mean:.4g} on average"
        return LockstepError(
            f"the ranks train on batches that do not belong together in the backward at {place}: in backward {step:.0f}{where}, rank "
            f"{rank} has drawn {drawn:.0f} batches, {others}. A rank has skipped a batch that others have trained on. Decide together "
            "before the backward: `if parwrap.any_rank(bad): continue`."
        )

    def close(self) -> None:
        self.positions.close()
