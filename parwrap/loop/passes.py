"""The open passes over loaders, the batches they have drawn, and the weight of each batch (contract, rules 2, 4 and 6).

``data/sources.py`` begins and ends passes; this file is what the rest of the loop knows about them.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from parwrap.errors import UsageError
from parwrap.loop import random_streams
from parwrap.loop.clock import Clock
from parwrap.loop.random_streams import RandomStreams
from parwrap.options import Options
from parwrap.places import Place, script_place

__all__ = ["DIGITS", "Batch", "Pass", "Passes", "loss_factor", "script_drops"]

MOST_ENDED = 64
"""How many ended passes may wait for a step: a script without optimizers never steps."""

MOST_IN_FLIGHT = 3
"""The number of batches to remember of a loop that trains on each batch before it draws the next one."""

DIGITS = 251
"""Digits of data are below this prime; so are their sums, which are taken modulo it."""


class Batch(NamedTuple):
    """A batch that a training pass has drawn.

    Attributes:
        samples: the number of samples in this rank's part.
        weight: the weight of this part in an average over ranks; the weights of all ranks have mean 1.
        left_out: how many samples were drawn for this part that are not in it, because the collate function left them out.
    """

    samples: int
    weight: float
    left_out: int = 0


def loss_factor(weight: float, size: int, options: Options) -> float:
    """The factor of a batch's loss on ``size`` ranks, besides ``weight``; 1.0 if the loss is a mean.

    A sum already grows with the samples, so the factor cancels ``weight``. With ``batch="global"``, the factor also makes a sum over ranks
    of the mean over ranks.

    >>> loss_factor(0.8, 2, Options()), loss_factor(0.8, 2, Options(loss="sum", batch="global"))
    (1.0, 2.5)
    """
    if options.loss == "mean" or not weight:
        return 1.0
    return (size if options.batch == "global" else 1) / weight


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


@dataclass(eq=False)
class Pass:
    """One iteration over a loader.

    Attributes:
        trains: whether it is a training pass.
        shared: whether this rank reads only its share.
        place: the line that reads it.
        why_whole: why every rank reads everything in it; empty if it trains.
        sharded: whether the script has called ``parwrap.shard`` on the loader.
        data: digits of a hash of what must be the same on all ranks; they travel with the pass's first backward.
        weights: the batches that the sampler has drawn ahead, in order; ``None`` if their weights are all 1.
        drawn_at: the number of batches that all passes had drawn when it drew its last one.
        in_thread: whether another thread than the loop's reads it: what depends on when that thread runs is not compared between ranks.
        after_eval: whether the script had put the model in eval mode since the last pass when it began.
        backwards: the number of backwards since it began.
        steps: the number of steps on its batches, of optimizers that are older than these.
        waits_for_step: whether it has drawn a batch since the last step.
        together: whether a step may train on its batch and on one of another pass, as where loaders are zipped.
        left_out: whether a step has trained on the batch of another pass, but not on its.
        length: the number of its batches; 0 if it is unknown.
        modes: how often the script had set the mode of a module when it drew its last batch.
        drawn: the number of batches drawn.
        drawn_by_loop: how many of these the thread of the loop has drawn.
        drawn_after: the number of all backwards when it drew its last batch.
        samples: the number of samples in the batches drawn.
        sizes: the number of samples in the first batch drawn and in the last one.
        whole: the number of samples of the dataset; ``None`` if it is unknown.
        endless_from: if its sampler has no length: so many samples on one rank show that it has no end. 0 otherwise.
        exhausted: whether it was read to its end.
        repeats: whether its line has begun it before and then trained, as ``next(iter(loader))`` in every step does.
        in_flight: the last three batches drawn, or more if the loop has not trained on these yet; only if batches have weights.
        ahead: whether the loop draws batches before it has trained on the last one.
        untrained: batches drawn minus batches trained on; all backwards between two draws train on one batch.
        depth: how many batches the loop had drawn before its first backward, except that of this backward.
        steps_left: after its end, how many steps still train on its batches, because the loop has read ahead.
    """

    trains: bool
    shared: bool
    place: Place
    why_whole: str = ""
    sharded: bool = False
    data: tuple[int, ...] = ()
    weights: deque[Batch] | None = None
    drawn_at: int = 0
    in_thread: bool = False
    after_eval: bool = False
    backwards: int = 0
    steps: int = 0
    waits_for_step: bool = False
    together: bool = False
    left_out: bool = False
    length: int = 0
    modes: int = 0
    drawn: int = 0
    drawn_by_loop: int = 0
    drawn_after: int = 0
    samples: int = 0
    sizes: tuple[int, int] = (0, 0)
    whole: int | None = None
    endless_from: int = 0
    exhausted: bool = False
    repeats: bool = False
    in_flight: deque[Batch] = field(default_factory=deque)
    ahead: bool = False
    untrained: int = 0
    depth: int = 0
    steps_left: int = 0
    _trained: bool = True

    @property
    def trained(self) -> bool:
        """Whether an optimizer has stepped on its batches."""
        return self.steps > 0

    @property
    def is_read(self) -> bool:
        """Whether all its batches were drawn, although the script may still hold its iterator."""
        return 0 < self.length == self.drawn

    def leads(self, modes: int) -> bool:
        """Whether the pass that begins now, after ``modes`` changes of modes, may be read for the same step, as where loaders are zipped.

        A validation is not, whose iterator the script still holds: all its batches are read, or the model has left eval mode since.
        """
        validated = (self.is_read and self.length > 1) or (self.after_eval and self.modes != modes)
        return self.waits_for_step and not self.left_out and not validated

    def drew(self, samples: int, lacks: Callable[[int], bool] | None) -> None:
        """Note that a batch of ``samples`` samples was drawn; ``lacks(n)`` returns whether some of ``n`` samples are not in it."""
        self.samples += samples
        self.sizes = self.sizes[0] or samples, samples
        self.untrained += 1
        self._trained = False
        if self.weights is not None:
            self.ahead = self.ahead or self.untrained > 1
            drawn = self.weights.popleft()
            self.in_flight.append(Batch(samples, drawn.weight, drawn.samples - samples if lacks and lacks(drawn.samples) else 0))
            while len(self.in_flight) > max(MOST_IN_FLIGHT, self.untrained):
                self.in_flight.popleft()

    def ran_backward(self) -> None:
        """Note that a backward ran while this pass was open."""
        if not self.backwards:
            self.depth = self.untrained - 1
        self.backwards += 1
        if not self._trained:
            self._trained = True
            self.untrained -= 1


class Passes:
    """The open passes, innermost last, and what they mean for random draws.

    Args:
        streams: the random streams of this rank.
        draws: ``"by_pass"`` or ``"per_rank"``, as in :class:`parwrap.distributed`.

    Attributes:
        streams: the random streams of this rank.
        batches: the number of batches that training passes have drawn so far; it identifies a batch.
        backwards: the number of backwards so far.
        begun: the number of passes over loaders that the thread of the loop has begun.
        draws: the number of batches that it has drawn, in passes of all kinds.
        modes: how often the script has set the mode of a module.
        evals: how often the script has put a module in eval mode.
        evals_before: that number when a pass last began or ended; ``None`` before the first pass.
        whole_at: the first line with a pass that every rank has read whole with gradients on, and without ``parwrap.replicate``.
        empty_at: the line of the last training pass that has ended without a batch.
        clock: how long the loop has trained and waited.
    """

    def __init__(self, streams: RandomStreams, draws: str = "by_pass") -> None:
        self.streams = streams
        self._own_after = 0 if draws == "per_rank" else None  # with this many backwards, ranks still draw the same
        self._open: list[Pass] = []
        self._last_training: Pass | None = None  # a training pass that has ended before a backward on its last batch
        self._ended: list[Pass] = []  # passes that have ended since the last step, and may have drawn batches for the next one
        self._read_since: list[Pass] = []  # training passes that have ended since the last backward
        self._computing_for: int | None = None  # inside the closure of a step: how many batches had been drawn when its optimizer was built
        self._same_draws, self._unsent = 0, False
        self.batches = self.backwards = self.begun = self.draws = self._drawn = self.evals = self.modes = 0
        self.evals_before: int | None = None
        self.whole_at: Place | None = None
        self.empty_at: Place | None = None
        self.clock = Clock()
        self._thread = threading.current_thread()

    def in_loop(self) -> bool:
        """Whether the thread of the loop runs this code: the one that ran the last backward, or any if that one has ended.

        Only that thread switches random streams, because torch has one stream for the whole process.
        """
        current = threading.current_thread()
        return current is self._thread or not self._thread.is_alive()

    @property
    def training(self) -> Pass | None:
        """The innermost open training pass. A pass that ``repeats`` counts as open after it is dropped, until another pass begins."""
        last = self._last_training
        for each in reversed(self._open):
            if each.trains:
                return each
        return last if last is not None and last.repeats else None

    @property
    def innermost(self) -> Pass | None:
        """The innermost open pass of any kind."""
        return self._open[-1] if self._open else None

    @property
    def around(self) -> Place | None:
        """The line of the training pass around the innermost open one, if ranks read shares of it."""
        return next((each.place for each in self._open[-2::-1] if each.shared), None)

    @property
    def backwards_so_far(self) -> int:
        """The number of backwards in the innermost training pass, or in the scope if the loop's thread reads none."""
        training = self.training
        return self.backwards if training is None or training.in_thread else training.backwards

    @property
    def in_weighted_batch(self) -> bool:
        """Whether the loop is at a batch whose parts on the ranks have weights, and not in an inner pass that reads everything."""
        training = self.training or self._last_training
        return training is not None and training.weights is not None and (not self._open or self._open[-1].trains)

    def begin(self, opened: Pass) -> None:
        """Add the pass ``opened``: it begins, or goes on after another pass over its loader has ended it."""
        self._last_training = None
        if not self._open:
            self._read_since = []
        for each in self._open:
            if each.leads(self.modes):
                each.together = opened.together = True
        self._open.append(opened)
        self.note_modes(opened)
        if opened.trains:
            self.clock.began_pass()
        self._unsent = self._unsent or bool(opened.data)

    def is_open(self, opened: Pass) -> bool:
        """Whether ``opened`` has begun and not ended."""
        return opened in self._open

    def awaits_step(self, ended: Pass) -> bool:
        """Whether ``ended`` is a training pass that has left a batch or gradients for the next step."""
        return ended in self._ended and ended.trains

    def end(self, closed: Pass) -> None:
        """Remove ``closed``. From the next :meth:`draw` on, the passes that are still open decide how the loop draws."""
        if closed in self._open:
            self._open.remove(closed)
            if closed.exhausted or not closed.is_read:  # else the script drops an iterator that it has held for nothing
                self.note_modes(closed)
            if not closed.after_eval and (closed.backwards or closed.in_thread or not closed.exhausted):
                self._ended = [*self._ended[1 - MOST_ENDED :], closed]
            if closed.trains:
                self._read_since.append(closed)
                self._last_training = closed if closed.untrained else None
                if closed.in_thread:
                    closed.steps_left = closed.drawn - closed.steps
                elif closed.backwards and closed.untrained == closed.depth:
                    closed.steps_left = closed.untrained
                self.clock.epochs[closed.place] += closed.exhausted
                if closed.exhausted and not closed.drawn:
                    self.empty_at = closed.place

    def note_modes(self, each: Pass | None = None) -> None:
        """Note that a pass begins or ends: eval modes that the script sets from now on are fresh."""
        if each is None or not each.in_thread:
            self.evals_before = self.evals

    def data_to_send(self) -> tuple[int, ...]:
        """The digits of all passes that have not sent theirs, added up; empty if all have."""
        if not self._unsent:
            return ()
        unsent = [each.data for each in self._sending() if each.data]
        return tuple(sum(digits) % DIGITS for digits in zip(*unsent, strict=True))

    def data_sent(self) -> None:
        """Note that the digits of :meth:`data_to_send` have been sent."""
        if self._unsent:
            self._unsent = False
            for each in self._sending():
                each.data = ()

    def _sending(self) -> list[Pass]:
        """The open passes; if there are none, the pass that ``repeats``, as in :attr:`training`."""
        return self._open or [each for each in [self.training] if each is not None]

    @property
    def drawn(self) -> int:
        """The number of batches that the loop has drawn in the innermost training pass; in all passes, if it reads none now."""
        return next((each.drawn_by_loop for each in reversed(self._sending()) if each.trains and each.drawn_by_loop), self._drawn)

    def draw(self) -> None:
        """Choose where the loop draws from: this rank's own streams of torch and numpy in a training pass, else the shared ones.

        Inside ``same_draws`` they are always shared. With ``"per_rank"``, all are this rank's own from the first backward on.
        """
        if self._same_draws:
            own = random_streams.NONE
        elif self._own_after is not None and self.backwards > self._own_after:
            own = random_streams.ALL
        else:
            reads_ahead = self._last_training is not None and self._last_training.steps_left > 0
            own = random_streams.TRAINING if self.training or reads_ahead else random_streams.NONE
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

    def drew(self, opened: Pass, samples: int, lacks: Callable[[int], bool] | None = None) -> None:
        """Note that ``opened`` has drawn a batch, which has ``samples`` samples on this rank if the pass trains.

        ``lacks(n)`` returns whether some of ``n`` samples are not in it; it is needed if batches have weights.
        """
        by_loop = self.in_loop()
        self.draws += not opened.in_thread
        self._drawn += by_loop
        opened.drawn, opened.drawn_at, opened.waits_for_step = opened.drawn + 1, self.draws, True
        opened.modes = self.modes
        if opened.trains:
            opened.drew(samples, lacks)
            opened.drawn_by_loop += by_loop
            self.clock.samples += samples
            opened.drawn_after = self.backwards
            self.batches += 1

    def stepped(self, built_at: int) -> None:
        """Note a step of an optimizer that was built when all passes had drawn ``built_at`` batches.

        It trains on the batch that an open pass has drawn last, and on those that others have drawn since the step before if these belong
        together: one pass began while the other waited for a step. A validation batch that is drawn after each step does not. It also
        trains on those of training passes inside of the open ones that the loop has left. If no pass is open, it trains on those of all
        training passes that have ended since, and of the pass that ended last, if the loop left them or ran a backward in them. An
        optimizer that was built for the last batch trains what belongs to this batch, such as an attack, and not on the loader.
        """
        self._count_step(built_at)
        self._ended = []
        if (last := self._last_training) is not None and last.steps_left:
            last.steps_left -= 1
            if not last.steps_left:
                self.draw()

    def zeroed(self) -> None:
        """Note that the script has cleared gradients: those of passes before the last one train nothing, such as a sum of squares."""
        self._ended = [each for each in self._ended[:-1] if not each.backwards] + self._ended[-1:]

    @contextmanager
    def computing(self, built_at: int) -> Iterator[None]:
        """Inside the block, the closure of a step runs: each backward counts as this step, before which its pass may end."""
        before, self._computing_for = self._computing_for, built_at
        try:
            yield
        finally:
            self._computing_for = before

    def _count_step(self, built_at: int) -> None:
        if len(self._open) == 1 and not self._ended:  # the regular loop
            each = self._open[0]
            if (each.waits_for_step and each.drawn_at > built_at) or (each.in_thread and each.drawn):
                each.steps, each.waits_for_step, each.left_out = each.steps + 1, False, False
            return
        since = min((each.drawn_at for each in self._open), default=0)
        ended = [each for each in self._ended if each.trains and (not self._open or (each.drawn_at > since and not each.exhausted))]
        passes = dict.fromkeys([*self._open, *ended, *([] if self._open else self._ended[-1:])])
        drew = [each for each in passes if (each.waits_for_step and each.drawn_at > built_at) or (each.in_thread and each.drawn)]
        candidates = [each for each in drew if not each.left_out] or drew
        last = max((each.drawn_at for each in candidates if each in self._open), default=0)
        if any(each.in_thread for each in drew):  # when such a pass begins and ends depends on the clock: its steps count instead
            self.note_modes()
        for each in drew:
            each.waits_for_step = False
            alone = each in self._open and not (each.drawn_at == last or each.together or each.in_thread or each.trained)
            if alone or each not in candidates:
                each.left_out = True
            else:
                each.steps += 1

    def ran_backward(self) -> None:
        """Note that a backward of the script ran."""
        self.backwards += 1
        self._thread = threading.current_thread()
        self.clock.end = time.perf_counter()
        for each in self._sending():
            each.ran_backward()
        self._read_since = []
        if self._computing_for is not None:
            self._count_step(self._computing_for)
        self.draw()

    @property
    def samples(self) -> int | None:
        """The number of samples in this rank's part of the batch drawn last; ``None`` if batches have no weights."""
        training = self.training or self._last_training
        return training.in_flight[-1].samples if training is not None and training.in_flight else None

    @property
    def short(self) -> tuple[int, int] | None:
        """The sizes of a short last batch of a share and of all batches of one process; ``None`` if one process has a short one too."""
        training = self.training or self._last_training
        if training is None or not training.shared or training.weights is not None:
            return None
        full, last = training.sizes
        return (last, full) if training.whole and last < full and training.whole % full == 0 else None

    def is_stand_in(self, samples: int) -> bool:
        """Whether the loop's batch of ``samples`` samples has weight 0: this rank has no part of it, and only joins the step."""
        training = self.training or self._last_training
        if training is None or all(batch.weight for batch in training.in_flight):
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
        training = self.training or self._last_training
        if training is None or not training.in_flight:
            return Batch(0, 1.0)
        newest = training.in_flight[-1]
        inside = (each for each in self._read_since if each.drawn_at > training.drawn_at)  # read to its end within this batch
        others = [each for each in (*self._open, *inside) if each.trains and each is not training and each.in_flight]
        if others and len({newest.weight, *(each.in_flight[-1].weight for each in others)}) > 1:
            return self._batch_of_loaders(training, others, set(sizes()))
        batches = list(dict.fromkeys(training.in_flight))
        if not training.ahead or len({batch.weight for batch in batches}) == 1:
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
        newest = training.in_flight[-1]
        shown = [each for each in others if each.in_flight[-1].samples in seen - {newest.samples}]
        if not shown:
            return newest
        if newest.samples not in seen:
            return shown[-1].in_flight[-1]
        if all(each.drawn_after < self.backwards for each in shown):  # a size by accident: they were trained on before
            return newest
        passes = [*shown, training]
        raise UsageError(
            f"{script_place()} calls one backward for batches of the loaders at {' and '.join(str(each.place) for each in passes)}, of "
            f"which this rank has parts of {', '.join(str(each.in_flight[-1].samples) for each in passes)} samples. With "
            'batch="global" or uneven="join" a loss is weighted by this '
            "rank's share of its batch. These shares differ, so no single weight is right for the sum of the losses. Call backward for "
            "each loss, or choose batch sizes that divide the datasets and that the number of ranks divides."
        )
