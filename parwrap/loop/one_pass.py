"""One pass over a loader: who reads what in it, the batches it has drawn, and the backwards and steps that have trained on them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from parwrap.places import Line, Place
from parwrap.ranks.environment import attribute

__all__ = ["Batch", "Pass", "Steps"]

MOST_IN_FLIGHT = 3
"""The number of batches to remember of a loop that trains on each batch before it draws the next one."""

MOST_ENDED = 64
"""How many ended passes may wait for a step: a script without optimizers never steps."""


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


@dataclass
class InFlight:
    """The batches of a training pass that the next backwards may train on.

    Attributes:
        batches: the last three batches drawn, or more if the loop has not trained on these yet; only if batches have weights.
        drawn_after: the number of all backwards when the pass drew its last batch; -1 before.
        untrained: batches drawn minus batches trained on; all backwards between two draws train on one batch.
        ahead: whether the loop draws batches before it has trained on the last one.
        depth: how many batches the loop had drawn before its first backward, except that of this backward.
    """

    batches: deque[Batch] = field(default_factory=deque)
    drawn_after: int = -1
    untrained: int = 0
    ahead: bool = False
    depth: int = 0


@dataclass
class PassSteps:
    """What :class:`Steps` knows of a pass.

    Attributes:
        count: the number of steps on its batches, of optimizers that are older than these.
        waits: whether it has drawn a batch since the last step.
        together: whether a step may train on its batch and on one of another pass, as where loaders are zipped.
        left_out: whether a step has trained on the batch of another pass, but not on its.
    """

    count: int = 0
    waits: bool = False
    together: bool = False
    left_out: bool = False


@dataclass(eq=False)
class Pass:
    """One iteration over a loader. A pickled pass has its plain data, without ``loader``, ``weights``, ``counting`` and ``rows``.

    Attributes:
        trains: whether it is a training pass.
        shared: whether this rank reads only its share.
        place: the line that reads it.
        why_whole: why every rank reads everything in it; empty if it trains, and in ``@evaluate``.
        stack: the calls that lead to the line.
        sharded: whether the script has called ``parwrap.shard`` on the loader.
        in_thread: whether another thread than the loop's reads it: what depends on when that thread runs is not compared between ranks.
        after_eval: whether the script had put the model in eval mode since the last pass when it began.
        repeats: whether its line has begun it before and then trained, as ``next(iter(loader))`` in every step does.
        length: the number of its batches; 0 if it is unknown.
        whole: the number of samples of the dataset; ``None`` if it is unknown.
        seed: the seed of the order of a share; 0 if the sampler draws it by itself.
        data: digits of a hash of what must be the same on all ranks; they travel with the pass's first backward.
        drawn: the number of batches drawn.
        drawn_by_loop: how many of these the thread of the loop has drawn.
        drawn_at: the number of batches that all passes had drawn when it drew its last one.
        modes: how often the script had set the mode of a module when it drew its last batch.
        samples: the number of samples in the batches drawn.
        repeated: how many samples of a stream this rank has read only to have as many batches as the others.
        sizes: the number of samples in the first batch drawn and in the last one.
        exhausted: whether it was read to its end.
        totalled: the number of batches drawn at its last total; ``None`` before.
        backwards: the number of backwards since it began.
        losses: the sum of the means over ranks that these have left in their losses.
        in_flight: the batches that backwards may train on.
        steps: the steps on its batches.
        loader: refers to the loader; ``None`` in ``@evaluate``.
        weights: the batches that the sampler has drawn ahead, in order; ``None`` if their weights are all 1.
        counting: counts the samples read, as :func:`parwrap.data.counts.counting` returns it; ``None`` if that is not known.
        rows: makes rows of its batches, with ``batch="whole"``.
    """

    trains: bool
    shared: bool
    place: Place
    why_whole: str = ""
    stack: tuple[Line, ...] = ()
    sharded: bool = False
    in_thread: bool = False
    after_eval: bool = False
    repeats: bool = False
    length: int = 0
    whole: int | None = None
    seed: int = 0
    data: tuple[int, ...] = ()

    drawn: int = 0
    drawn_by_loop: int = 0
    drawn_at: int = 0
    modes: int = 0
    samples: int = 0
    repeated: int = 0
    sizes: tuple[int, int] = (0, 0)
    exhausted: bool = False
    totalled: int | None = None

    backwards: int = 0
    losses: float = 0.0
    in_flight: InFlight = field(default_factory=InFlight)
    steps: PassSteps = field(default_factory=PassSteps)

    loader: weakref.ref[Any] | None = None
    weights: deque[Batch] | None = None
    counting: Callable[[int, bool], Any] | None = None
    rows: Callable[[Any], Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "loader": None, "weights": None, "counting": None, "rows": None}

    @property
    def trained(self) -> bool:
        """Whether an optimizer has stepped on its batches."""
        return self.steps.count > 0

    @property
    def was_used(self) -> bool:
        """Whether a step or a backward has used its batches."""
        return self.trained or self.backwards > 0

    @property
    def has_trained(self) -> bool | None:
        """Whether it has trained; ``None`` if nothing follows from it.

        A pass without a batch shows nothing. After a backward, the step may follow the pass.
        """
        if not self.trained and (not self.drawn or (self.backwards and not self.exhausted)):
            return None
        return self.trained

    @property
    def is_read(self) -> bool:
        """Whether all its batches were drawn, although the script may still hold its iterator."""
        return 0 < self.length == self.drawn

    @property
    def steps_ahead(self) -> int:
        """How many steps train on its batches after its end: those of a loop that reads ahead, as accelerate's does."""
        untrained = self.in_flight.untrained
        if self.in_thread:
            return max(self.drawn - self.steps.count, 0)
        return untrained if self.backwards and untrained == self.in_flight.depth else 0

    def drew(self, samples: int, backwards: int, lacks: Callable[[int], bool] | None = None) -> None:
        """Note that a batch of ``samples`` samples was drawn to train on, after ``backwards`` backwards in all passes.

        ``lacks(n)`` returns whether some of ``n`` samples are not in it; it is needed if batches have weights.
        """
        self.samples += samples
        self.sizes = self.sizes[0] or samples, samples
        flight = self.in_flight
        flight.untrained += 1
        flight.drawn_after = backwards
        if self.weights is None:
            return
        flight.ahead = flight.ahead or flight.untrained > 1
        drawn = self.weights.popleft()
        flight.batches.append(Batch(samples, drawn.weight, drawn.samples - samples if lacks and lacks(drawn.samples) else 0))
        while len(flight.batches) > max(MOST_IN_FLIGHT, flight.untrained):
            flight.batches.popleft()

    def repeats_samples(self, samples: int) -> None:
        """Note that this rank repeats ``samples`` samples of a stream."""
        self.repeated += samples

    def ran_backward(self, before: int) -> None:
        """Note that a backward ran while this pass was open, ``before`` others before it in all passes."""
        flight = self.in_flight
        if not self.backwards:
            flight.depth = flight.untrained - 1
        self.backwards += 1
        flight.untrained -= before == flight.drawn_after


class Steps:
    """Counts in each pass the steps on its batches (contract, small print on passes).

    A step trains on the batch that an open pass has drawn last, and on those that others have drawn since the step before if these belong
    together: one pass began while the other waited for a step. A validation batch that is drawn after each step does not. It also trains
    on those of training passes inside of the open ones that the loop has left. If no pass is open, it trains on those of all training
    passes that have ended since, and of the pass that ended last, if the loop left them or ran a backward in them. An optimizer that was
    built for the last batch trains what belongs to this batch, such as an attack, and not on the loader.

    Args:
        opened: the open passes, innermost last; the owner of the list changes it.

    Attributes:
        ended: the passes that have ended since the last step, and may have drawn batches for the next one.
        computing_for: inside the closure of a step, how many batches had been drawn when its optimizer was built; ``None`` outside.
    """

    def __init__(self, opened: list[Pass]) -> None:
        self._open = opened
        self.ended: list[Pass] = []
        self.computing_for: int | None = None

    def begins(self, opened: Pass, modes: int) -> None:
        """Note that ``opened`` begins, before it is open and after ``modes`` changes of modes. Passes that wait for a step may share it."""
        for each in self._open:
            if _may_share(each, modes):
                each.steps.together = opened.steps.together = True

    def ends(self, closed: Pass) -> None:
        """Note that ``closed`` ends."""
        if not closed.after_eval and (closed.backwards or closed.in_thread or not closed.exhausted):
            self.ended = [*self.ended[1 - MOST_ENDED :], closed]

    def awaits(self, ended: Pass) -> bool:
        """Whether ``ended`` is a training pass that has left a batch or gradients for the next step."""
        return ended in self.ended and ended.trains

    def zeroed(self) -> None:
        """Note that the script has cleared gradients: those of passes before the last one train nothing, such as a sum of squares."""
        if self.ended:
            self.ended = [each for each in self.ended[:-1] if not each.backwards] + self.ended[-1:]

    def computing(self, built_at: int) -> AbstractContextManager[None]:
        """Inside the block, the closure of a step runs: each backward counts as this step, before which its pass may end."""
        return attribute(self, "computing_for", built_at)

    def count(self, built_at: int) -> bool:
        """Count a step of an optimizer that was built when all passes had drawn ``built_at`` batches.

        Returns whether it trains on one of several passes that another thread reads: the clock decides when that pass begins and ends.
        """
        if len(self._open) != 1 or self.ended:
            return self._count_of_several(built_at)
        each = self._open[0]
        # a steady step makes no further call
        if (each.steps.waits and each.drawn_at > built_at) or _trains_on(each, built_at):
            steps = each.steps
            steps.count, steps.waits, steps.left_out = steps.count + 1, False, False
        return False

    def _count_of_several(self, built_at: int) -> bool:
        since = min((each.drawn_at for each in self._open), default=0)
        ended = [each for each in self.ended if each.trains and (not self._open or (each.drawn_at > since and not each.exhausted))]
        passes = dict.fromkeys([*self._open, *ended, *([] if self._open else self.ended[-1:])])
        drew = [each for each in passes if _trains_on(each, built_at)]
        candidates = [each for each in drew if not each.steps.left_out] or drew
        last = max((each.drawn_at for each in candidates if each in self._open), default=0)
        for each in drew:
            each.steps.waits = False
            alone = each in self._open and not (each.drawn_at == last or each.steps.together or each.in_thread or each.trained)
            if alone or each not in candidates:
                each.steps.left_out = True
            else:
                each.steps.count += 1
        return any(each.in_thread for each in drew)


def _may_share(each: Pass, modes: int) -> bool:
    """Whether a pass that begins now, after ``modes`` changes of modes, may be read for the same step, as where loaders are zipped.

    Not with a validation whose iterator the script still holds: all its batches are read, or the model has left eval mode since.
    """
    validated = (each.is_read and each.length > 1) or (each.after_eval and each.modes != modes)
    return each.steps.waits and not each.steps.left_out and not validated


def _trains_on(each: Pass, built_at: int) -> bool:
    """Whether a step of an optimizer trains on a batch of the pass, if it trains on the pass at all."""
    return (each.steps.waits and each.drawn_at > built_at) or (each.in_thread and each.drawn > 0)
