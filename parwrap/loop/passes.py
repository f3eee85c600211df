"""The open passes over loaders, where the loop draws, and the weight of each batch (contract, rules 2, 4 and 6).

``data/sources.py`` begins and ends passes; this file is what the rest of the loop knows about them.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from parwrap.errors import UsageError
from parwrap.loop import random_streams
from parwrap.loop.clock import Clock
from parwrap.loop.one_pass import Batch, Pass, Steps
from parwrap.loop.random_streams import RandomStreams
from parwrap.options import Options
from parwrap.places import Place, script_place

__all__ = ["DIGITS", "Passes", "loss_factor", "script_drops"]

DIGITS = 251
"""Digits of data are below this prime; so are their sums, which are taken modulo it."""

UNWEIGHTED = Batch(0, 1.0)
"""The batch of a pass whose batches have no weights."""


def loss_factor(weight: float, size: int, options: Options, whole: bool = False) -> float:
    """The factor of a batch's loss on ``size`` ranks, besides ``weight``; 1.0 if the loss is a mean.

    A sum already grows with the samples, so the factor cancels ``weight``. With ``batch="global"``, the factor also makes a sum over ranks
    of the mean over ranks, unless every rank reads the ``whole`` batch.

    >>> loss_factor(0.8, 2, Options()), loss_factor(0.8, 2, Options(loss="sum", batch="global"))
    (1.0, 2.5)
    >>> loss_factor(1.0, 2, Options(loss="sum", batch="global"), whole=True)
    1.0
    """
    if options.loss == "mean" or not weight:
        return 1.0
    return (size if options.batch == "global" and not whole else 1) / weight


@contextmanager
def script_drops() -> Iterator[Callable[[], bool]]:
    """Yields a function that returns, in a finalizer, whether the script has dropped the object.

    It returns false if the garbage collector runs the finalizer. The collector runs at a different time on each rank, so nothing may follow
    from what it finds.
    """
    collecting: list[int] = []  # the thread in which the collector runs

    def note(phase: str, info: dict[str, int]) -> None:
        collecting[:] = [threading.get_ident()] if phase == "start" else []

    gc.callbacks.append(note)
    try:
        yield lambda: threading.get_ident() not in collecting
    finally:
        gc.callbacks.remove(note)


class Passes:
    """The open passes, innermost last, and what they mean for random draws.

    Args:
        streams: the random streams of this rank.
        draws: ``"by_pass"`` or ``"per_rank"``, as in :class:`parwrap.distributed`.

    Attributes:
        streams: the random streams of this rank.
        open: the open passes, innermost last.
        steps: counts the steps on the batches of each pass.
        training: the innermost open training pass. A pass that ``repeats`` counts as open after it is dropped, until another pass begins.
        batches: the number of batches that training passes have drawn so far; it identifies a batch.
        backwards: the number of backwards so far.
        begun: the number of passes over loaders that the thread of the loop has begun.
        draws: the number of batches that passes which it has begun have drawn, whether they train or not; it orders batches and optimizers.
        modes: how often the script has set the mode of a module.
        evals: how often the script has put a module in eval mode.
        evals_before: that number when a pass last began or ended; ``None`` before the first pass.
        whole_at: the first line with a pass that every rank has read whole with gradients on, and without ``parwrap.replicate``.
        empty_at: the line of the last training pass that has ended without a batch.
        unsent: whether a pass may not have sent its digits yet.
        clock: how long the loop has trained and waited.
    """

    def __init__(self, streams: RandomStreams, draws: str = "by_pass") -> None:
        self.streams = streams
        self._own_after = 0 if draws == "per_rank" else None  # with this many backwards, ranks still draw the same
        self.open: list[Pass] = []
        self.steps = Steps(self.open)
        self.training: Pass | None = None
        self._last_training: Pass | None = None  # a training pass that has ended before a backward on its last batch
        self._current: Pass | None = None  # the training pass whose batch the loop is at: the open one, or that one
        self._newest: Pass | None = None  # the training pass that the loop has begun last
        self._steps_ahead = 0  # how many steps still train on batches of that pass, because the loop has read ahead
        self._read_since: list[Pass] = []  # training passes that have ended since the last backward
        self._same_draws, self.unsent = 0, False
        self.batches = self.backwards = self.begun = self.draws = self.evals = self.modes = 0
        self._drawn_by_loop = 0  # in passes of all kinds, whichever thread has begun them
        self.evals_before: int | None = None
        self.whole_at: Place | None = None
        self.empty_at: Place | None = None
        self.clock = Clock()
        self._thread, self._thread_id = threading.current_thread(), threading.get_ident()

    def in_loop(self) -> bool:
        """Whether the thread of the loop runs this code: the one that ran the last backward, or any if that one has ended.

        Only that thread switches random streams, because torch has one stream for the whole process.
        """
        return threading.get_ident() == self._thread_id or not self._thread.is_alive()

    @property
    def innermost(self) -> Pass | None:
        """The innermost open pass of any kind."""
        return self.open[-1] if self.open else None

    @property
    def around(self) -> Place | None:
        """The line of the training pass around the innermost open one, if ranks read shares of it."""
        return next((each.place for each in self.open[-2::-1] if each.shared), None)

    @property
    def progress(self) -> tuple[int, int]:
        """How many backwards and batches the loop has had in the innermost training pass; in the scope if its thread reads none."""
        training, backwards, drawn = self.training, self.backwards, self._drawn_by_loop
        if training is not None:
            backwards = backwards if training.in_thread else training.backwards
            drawn = training.drawn_by_loop or self._drawn_around()
        return backwards, drawn

    def _drawn_around(self) -> int:
        """The batches that the loop has drawn in a training pass around the innermost one; in all passes, if it reads none there."""
        return next((each.drawn_by_loop for each in reversed(self.open) if each.trains and each.drawn_by_loop), self._drawn_by_loop)

    @property
    def done(self) -> tuple[int, int]:
        """How many backwards the loop has run in its last training pass, and how many batches it has drawn; zeros before the first one."""
        return (0, 0) if self._newest is None else (self._newest.backwards, self._newest.drawn)

    @property
    def reads_whole(self) -> bool:
        """Whether the loop's batch is the same on every rank: it is of no share, and ranks draw alike."""
        training = self._current
        return not (self.draws_own or (training is not None and training.shared))

    @property
    def in_weighted_batch(self) -> bool:
        """Whether the loop is at a batch whose parts on the ranks have weights, and not in an inner pass that reads everything."""
        training = self._current
        return training is not None and training.weights is not None and (not self.open or self.open[-1].trains)

    def begin(self, opened: Pass) -> None:
        """Add the pass ``opened``: it begins, or goes on after another pass over its loader has ended it."""
        self._last_training, self._steps_ahead = None, 0
        if not self.open:
            self._read_since = []
        self.steps.begins(opened, self.modes)
        self.open.append(opened)
        self._find_training()
        self.note_modes(opened)
        if opened.trains:
            self.clock.began_pass()
            self._newest = self._newest if opened.in_thread else opened
        self.unsent = self.unsent or bool(opened.data)

    def over(self, loader: Any) -> list[Pass]:
        """The open passes over ``loader``, innermost last."""
        return [each for each in self.open if each.loader is not None and each.loader() is loader]

    def _find_training(self) -> None:
        last = self._last_training
        repeated = last if last is not None and last.repeats else None
        self.training = next((each for each in reversed(self.open) if each.trains), repeated)
        self._current = self.training or last

    def end(self, closed: Pass) -> None:
        """Remove ``closed``. From the next :meth:`draw` on, the passes that are still open decide how the loop draws."""
        if closed in self.open:
            self.open.remove(closed)
            if closed.exhausted or not closed.is_read:  # else the script drops an iterator that it has held for nothing
                self.note_modes(closed)
            self.steps.ends(closed)
            self.clock.epochs[closed.place] += closed.trained and (closed.exhausted or closed.drawn > 1)
            if closed.trains:
                self._read_since.append(closed)
                self._last_training, self._steps_ahead = (closed, closed.steps_ahead) if closed.in_flight.untrained else (None, 0)
                if closed.exhausted and not closed.drawn:
                    self.empty_at = closed.place
            self._find_training()

    def note_modes(self, each: Pass | None = None) -> None:
        """Note that a pass begins or ends: eval modes that the script sets from now on are fresh."""
        if each is None or not each.in_thread:
            self.evals_before = self.evals

    def data_to_send(self) -> tuple[int, ...]:
        """The digits of all passes that have not sent theirs, added up; empty if all have."""
        unsent = [each.data for each in self._sending() if each.data]
        return tuple(sum(digits) % DIGITS for digits in zip(*unsent, strict=True))

    def data_sent(self) -> None:
        """Note that the digits of :meth:`data_to_send` have been sent."""
        self.unsent = False
        for each in self._sending():
            each.data = ()

    def _sending(self) -> list[Pass]:
        """The open passes; if there are none, the pass that ``repeats``, as in :attr:`training`."""
        return self.open or ([] if self.training is None else [self.training])

    def draw(self) -> None:
        """Choose where the loop draws from: this rank's own streams of torch and numpy in a training pass, else the shared ones.

        Inside ``same_draws`` they are always shared. With ``"per_rank"``, all are this rank's own from the first backward on.
        """
        if self._same_draws:
            own = random_streams.NONE
        elif self._own_after is not None and self.backwards > self._own_after:
            own = random_streams.ALL
        else:
            own = random_streams.TRAINING if self.training or self._steps_ahead else random_streams.NONE
        self.streams.use(own)

    @property
    def draws_own(self) -> bool:
        """Whether each rank draws its own random numbers from the first backward on."""
        return self._own_after is not None

    @contextmanager
    def drawing(self, draws: str) -> Iterator[None]:
        """Let the ranks draw as ``draws`` says inside the block; with ``"per_rank"``, from the first backward in it on."""
        before, self._own_after = self._own_after, self.backwards if draws == "per_rank" else None
        self.draw()
        try:
            yield
        finally:
            self._own_after = before
            self.draw()

    def same_draws(self, entered: bool) -> None:
        """Record that the script has ``entered`` or left ``with parwrap.same_draws()``, in which all ranks draw the same numbers."""
        self._same_draws += 1 if entered else -1
        self.draw()

    def drew(self, opened: Pass, samples: int, by_loop: bool = True, lacks: Callable[[int], bool] | None = None) -> None:
        """Note that ``opened`` has drawn a batch, which has ``samples`` samples on this rank if the pass trains.

        ``by_loop``: whether the thread of the loop has drawn it. ``lacks(n)`` returns whether some of ``n`` samples are not in it; it is
        needed if batches have weights.
        """
        self.draws += not opened.in_thread
        self._drawn_by_loop += by_loop
        opened.drawn += 1
        opened.drawn_by_loop += by_loop
        opened.drawn_at, opened.modes, opened.steps.waits = self.draws, self.modes, True
        if opened.trains:
            opened.drew(samples, self.backwards, lacks)
            self.clock.samples += samples
            self.batches += 1

    def stepped(self, built_at: int) -> None:
        """Note a step of an optimizer that was built when all passes had drawn ``built_at`` batches."""
        if self.steps.count(built_at):
            self.note_modes()
        self.steps.ended = []
        if self._steps_ahead:
            self._steps_ahead -= 1
            if not self._steps_ahead:
                self.draw()

    def ran_backward(self) -> None:
        """Note that a backward of the script ran."""
        if threading.get_ident() != self._thread_id:
            self._thread, self._thread_id = threading.current_thread(), threading.get_ident()
        self.clock.end = time.perf_counter()
        for each in self._sending():
            each.ran_backward(self.backwards)
        self.backwards += 1
        self._read_since = []
        if self.steps.computing_for is not None and self.steps.count(self.steps.computing_for):
            self.note_modes()
        self.draw()

    @property
    def samples(self) -> int | None:
        """The number of samples in this rank's part of the batch drawn last; ``None`` if batches have no weights."""
        training = self._current
        return training.in_flight.batches[-1].samples if training is not None and training.in_flight.batches else None

    @property
    def short(self) -> tuple[int, int] | None:
        """The sizes of a short last batch of a share and of all batches of one process; ``None`` if one process has a short one too."""
        training = self._current
        if training is None or not training.shared or training.weights is not None:
            return None
        full, last = training.sizes
        return (last, full) if training.whole and last < full and training.whole % full == 0 else None

    def is_stand_in(self, samples: int) -> bool:
        """Whether the loop's batch of ``samples`` samples has weight 0: this rank has no part of it, and only joins the step."""
        training = self._current
        if training is None or all(batch.weight for batch in training.in_flight.batches):
            return False
        return not self.batch(lambda: [samples]).weight

    def batch(self, sizes: Callable[[], Iterable[int]]) -> Batch:
        """The batch that a backward trains on, from which the loss gets its weight.

        It is the batch drawn last, even if its pass has ended since. If the loop draws ahead or reads several loaders, and the weights
        differ, the size of the batch decides. If batches have no weights, it is ``Batch(0, 1.0)``.

        Args:
            sizes: a function that returns the sizes of the first dimensions in the graph of the loss.

        Raises:
            UsageError: several batches have such sizes.
        """
        training = self._current
        if training is None or not training.in_flight.batches:
            return UNWEIGHTED
        newest = training.in_flight.batches[-1]
        inside = (each for each in self._read_since if each.drawn_at > training.drawn_at)  # read to its end within this batch
        others = [each for each in (*self.open, *inside) if each.trains and each is not training and each.in_flight.batches]
        if others and len({newest.weight, *(each.in_flight.batches[-1].weight for each in others)}) > 1:
            return self._batch_of_loaders(training, others, set(sizes()))
        batches = list(dict.fromkeys(training.in_flight.batches))
        if not training.in_flight.ahead or len({batch.weight for batch in batches}) == 1:
            return newest
        seen = set(sizes())
        found = {batch for batch in batches if batch.samples in seen}
        if len(found) == 1:
            return found.pop()
        raise UsageError(
            f"{script_place()} trains on a batch of the loader at {training.place}, which has drawn several batches ahead, or skipped some "
            f"({', '.join(str(batch.samples) for batch in batches)} samples). Their weights differ, and parwrap cannot tell which batch "
            "this loss belongs to. Call backward on each batch before the next one is drawn, or choose a batch size that divides the "
            "dataset and that the number of ranks divides."
        )

    def _batch_of_loaders(self, training: Pass, others: list[Pass], seen: set[int]) -> Batch:
        """The batch that the loss was computed from: the last one of the pass ``training``, or of one of the passes ``others``.

        Its number of samples must be among ``seen``, the leading sizes in the graph. If the sizes do not decide, it is the batch of
        ``training``.

        Raises:
            UsageError: the last batches of several passes have such sizes.
        """
        newest = training.in_flight.batches[-1]
        shown = [each for each in others if each.in_flight.batches[-1].samples in seen - {newest.samples}]
        if not shown:
            return newest
        if newest.samples not in seen:
            return shown[-1].in_flight.batches[-1]
        if all(each.in_flight.drawn_after < self.backwards for each in shown):  # a size by accident: they were trained on before
            return newest
        passes = [*shown, training]
        raise UsageError(
            f"{script_place()} calls one backward for batches of the loaders at {' and '.join(str(each.place) for each in passes)}, of "
            f"which this rank has parts of {', '.join(str(each.in_flight.batches[-1].samples) for each in passes)} samples. With "
            'batch="global" or uneven="join" a loss is weighted by this '
            "rank's share of its batch. These shares differ, so no single weight is right for the sum of the losses. Call backward for "
            "each loss, or choose batch sizes that divide the datasets and that the number of ranks divides."
        )
