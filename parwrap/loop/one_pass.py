"""One pass over a loader: who reads what in it, the batches it has drawn, and what has trained on them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from parwrap.places import Place

__all__ = ["Batch", "Pass"]

MOST_IN_FLIGHT = 3
"""The number of batches to remember of a loop that trains on each batch before it draws the next one."""


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


@dataclass(eq=False)
class Pass:
    """One iteration over a loader.

    Attributes:
        trains: whether it is a training pass.
        shared: whether this rank reads only its share.
        place: the line that reads it.
        why_whole: why every rank reads everything in it; empty if it trains, and in ``@evaluate``.
        sharded: whether the script has called ``parwrap.shard`` on the loader.
        data: digits of a hash of what must be the same on all ranks; they travel with the pass's first backward.
        weights: the batches that the sampler has drawn ahead, in order; ``None`` if their weights are all 1.
        in_thread: whether another thread than the loop's reads it: what depends on when that thread runs is not compared between ranks.
        after_eval: whether the script had put the model in eval mode since the last pass when it began.
        repeats: whether its line has begun it before and then trained, as ``next(iter(loader))`` in every step does.
        length: the number of its batches; 0 if it is unknown.
        whole: the number of samples of the dataset; ``None`` if it is unknown.
        loader: refers to the loader; ``None`` in ``@evaluate``.
        drawn: the number of batches drawn.
        drawn_by_loop: how many of these the thread of the loop has drawn.
        drawn_at: the number of batches that all passes had drawn when it drew its last one.
        drawn_after: the number of all backwards when it drew its last batch to train on; -1 before.
        modes: how often the script had set the mode of a module when it drew its last batch.
        samples: the number of samples in the batches drawn.
        repeated: how many samples of a stream this rank has read only to have as many batches as the others.
        sizes: the number of samples in the first batch drawn and in the last one.
        in_flight: the last three batches drawn, or more if the loop has not trained on these yet; only if batches have weights.
        exhausted: whether it was read to its end.
        backwards: the number of backwards since it began.
        losses: the sum of the means over ranks that these have left in their losses.
        untrained: batches drawn minus batches trained on; all backwards between two draws train on one batch.
        ahead: whether the loop draws batches before it has trained on the last one.
        depth: how many batches the loop had drawn before its first backward, except that of this backward.
        steps: the number of steps on its batches, of optimizers that are older than these.
        waits_for_step: whether it has drawn a batch since the last step.
        together: whether a step may train on its batch and on one of another pass, as where loaders are zipped.
        left_out: whether a step has trained on the batch of another pass, but not on its.
    """

    trains: bool
    shared: bool
    place: Place
    why_whole: str = ""
    sharded: bool = False
    data: tuple[int, ...] = ()
    weights: deque[Batch] | None = None
    in_thread: bool = False
    after_eval: bool = False
    repeats: bool = False
    length: int = 0
    whole: int | None = None
    loader: weakref.ref[Any] | None = None

    drawn: int = 0
    drawn_by_loop: int = 0
    drawn_at: int = 0
    drawn_after: int = -1
    modes: int = 0
    samples: int = 0
    repeated: int = 0
    sizes: tuple[int, int] = (0, 0)
    in_flight: deque[Batch] = field(default_factory=deque)
    exhausted: bool = False

    backwards: int = 0
    losses: float = 0.0
    untrained: int = 0
    ahead: bool = False
    depth: int = 0
    steps: int = 0
    waits_for_step: bool = False
    together: bool = False
    left_out: bool = False

    @property
    def trained(self) -> bool:
        """Whether an optimizer has stepped on its batches."""
        return self.steps > 0

    @property
    def was_used(self) -> bool:
        """Whether a step or a backward has used its batches."""
        return self.steps > 0 or self.backwards > 0

    @property
    def is_read(self) -> bool:
        """Whether all its batches were drawn, although the script may still hold its iterator."""
        return 0 < self.length == self.drawn

    def drew(self, samples: int, backwards: int) -> None:
        """Note that a batch of ``samples`` samples was drawn to train on, after ``backwards`` backwards in all passes."""
        self.samples += samples
        self.sizes = self.sizes[0] or samples, samples
        self.untrained += 1
        self.drawn_after = backwards

    def repeats_samples(self, samples: int) -> None:
        """Note that this rank repeats ``samples`` samples of a stream."""
        self.repeated += samples

    def weigh(self, samples: int, lacks: Callable[[int], bool] | None) -> None:
        """Note the weight of the batch drawn last; ``lacks(n)`` returns whether some of ``n`` samples are not in it."""
        assert self.weights is not None
        self.ahead = self.ahead or self.untrained > 1
        drawn = self.weights.popleft()
        self.in_flight.append(Batch(samples, drawn.weight, drawn.samples - samples if lacks and lacks(drawn.samples) else 0))
        while len(self.in_flight) > max(MOST_IN_FLIGHT, self.untrained):
            self.in_flight.popleft()

    def ran_backward(self, before: int) -> None:
        """Note that a backward ran while this pass was open, ``before`` others before it in all passes."""
        if not self.backwards:
            self.depth = self.untrained - 1
        self.backwards += 1
        self.untrained -= before == self.drawn_after
