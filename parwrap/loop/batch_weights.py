"""Tracks the weight of this rank's part of each batch, in an average over ranks, until the backward pass of that batch.

Most loops draw a batch and run its backward passes before they draw another. With a prefetcher, which is some batches ahead, the order of
draws or the tensor sizes in the graph identify the batch of a backward pass. Sizes are read only if the candidates have different weights.
They also identify the batch where a loop trains again on kept batches, as with ``itertools.cycle``. If the loop leaves a pass before it
trains on the batch, for example with ``next(iter(loader))``, the backward passes that follow belong to that batch.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from parwrap.coordination.call_site import location, warn

__all__ = ["BatchWeights", "Reading", "Weighed"]

MOST_AHEAD = 64
"""The number of batches to remember of a pass."""

MOST_KEPT = 4096
"""The number of kept batches to search."""


class Weighed(NamedTuple):
    """A batch.

    Attributes:
        weight: the weight of this rank's part in an average over ranks.
        loss_factor: the factor of its loss in addition to the weight.
        samples: the number of samples in this rank's part.
        split: whether it is a part of a larger batch, which a single process would have as a whole.
    """

    weight: float = 1.0
    loss_factor: float = 1.0
    samples: int = 0
    split: bool = False


OUTSIDE = Weighed()
"""The batch when no loader has yielded one."""


@dataclass(eq=False)
class Reading:
    """A pass over a loader.

    Attributes:
        batches: the last batches drawn.
        drawn: the number of batches drawn.
        new: how many of them were drawn between the last two backward passes.
        seen: the number of batches drawn at the last backward.
        ahead: how far the loop draws ahead, in batches; ``None`` before the first backward.
        trained: the number of batches with a backward, including the current one.
        backwards, usual: backward passes of the current batch, and of the one before.
        open: whether more batches may follow.
        by_thread: whether a thread draws the batches, and may be ahead by a different number on each rank.
    """

    batches: deque[Weighed] = field(default_factory=lambda: deque(maxlen=MOST_AHEAD))
    drawn: int = 0
    new: int = 0
    seen: int = 0
    ahead: int | None = None
    trained: int = 0
    backwards: int = 0
    usual: int = 0
    open: bool = True
    by_thread: bool = False

    def run_backward(self) -> None:
        """Update the counts for a backward pass that is about to run."""
        self.new, self.seen = self.drawn - self.seen, self.drawn
        if self.new:
            # a loop that skips batches, or uses several at once, is not ahead
            self.ahead = self.new - 1 if self.ahead is None else self.ahead if self.new == 1 else 0
        if self.new or (not self.open and self.backwards >= self.usual):
            self.usual, self.backwards = self.backwards, 0
            self.trained += 1
        self.backwards += 1

    @property
    def waits(self) -> bool:
        """Whether a batch that was drawn ahead still awaits training."""
        return bool(self.ahead) and (self.trained < self.drawn or self.backwards < self.usual)

    def candidates(self) -> list[Weighed]:
        """The candidates for the batch of the running backward; the expected one comes first if the loop is ahead, otherwise last."""
        count = self.drawn - self.trained + 1 if self.ahead else max(self.new, 1)
        return list(self.batches)[-max(count, 1) :]


class BatchWeights:
    """The weights of the batches in training.

    Attributes:
        current: the batch that counts now: the batch of the last backward pass, or one drawn since.
        last: the batch drawn last.
        drawn: whether any batch was drawn; otherwise the weight is 1.
    """

    def __init__(self) -> None:
        self.current = self.last = OUTSIDE
        self.drawn = False
        self._readings: list[Reading] = []
        self._differ = self._split = False
        self._drawn: deque[tuple[weakref.ref[Any], Reading, Weighed]] = deque(maxlen=MOST_KEPT)
        self._broken_off: tuple[Weighed, ...] = ()  # batches of passes that were left early, without a backward pass inside
        self._trained_after = False
        self._warned = False

    @property
    def number(self) -> int:
        """The position of the current batch in its pass, the same on all ranks, if ranks split the batch; otherwise 0."""
        reading = self._readings[-1] if self._readings else None
        return reading.drawn if reading and self.current.split and not reading.by_thread else 0

    def draw(self, reading: Reading, batch: Weighed, tensor: Any = None) -> None:
        """Record that a pass has yielded ``batch``, which contains ``tensor``."""
        self._readings = [each for each in self._readings if each.open and each is not reading] + [reading]
        reading.drawn += 1
        reading.by_thread |= threading.current_thread() is not threading.main_thread()
        reading.batches.append(batch)
        if tensor is not None:
            self._drawn.append((weakref.ref(tensor), reading, batch))
        self._differ |= batch[:2] != OUTSIDE[:2]
        self._split |= batch.split
        self.current = self.last = batch
        self.drawn = True

    def close(self, reading: Reading, broken_off: bool = False) -> None:
        """Close a pass that has ended or was ``broken_off`` early. An outer pass continues with its own batch."""
        reading.open = False
        self._readings = [each for each in self._readings if each.open or each.waits]
        if broken_off and reading.drawn > reading.seen:
            batch, others = reading.batches[-1], () if self._trained_after else self._broken_off
            self._broken_off = (*(each for each in others if each != batch), batch)
        else:
            self._broken_off = ()
        self._trained_after = False
        latest = self._readings[-1].batches if self._readings else self._broken_off
        self.current = latest[-1] if latest else OUTSIDE

    def find(self, sizes: Callable[[], Collection[int]]) -> Weighed:
        """The batch of the backward that is about to run.

        Args:
            sizes: a function that returns the first dimensions of the tensors in the graph.
        """
        if self._readings:
            for reading in self._readings:
                reading.run_backward()
            self.current = self._chosen(self._readings, sizes)
            self._readings = [each for each in self._readings if each.open or each.waits]
            self._broken_off = ()
        else:
            self.current = self._kept(sizes)
            self._trained_after = True
        return self.current

    def upcoming(self, sizes: Callable[[], Collection[int]]) -> Weighed:
        """The result of :meth:`find` for the next backward."""
        readings = [replace(each) for each in self._readings]
        for reading in readings:
            reading.run_backward()
        return self._chosen(readings, sizes) if readings else self._kept(sizes)

    def check_kept(self) -> None:
        """Called when gradients are used that no backward pass computed: outside of all passes, their batch is unknown."""
        if not self._readings and self._differ and not self._broken_off:
            self._warn()

    def _kept(self, sizes: Callable[[], Collection[int]]) -> Weighed:
        """The batch of a backward pass outside of all passes over loaders: a kept batch of a finished pass, or none."""
        if not (self._differ or self._split):
            return OUTSIDE  # usually true
        if batch := self._of_broken_off(sizes):
            return batch
        if not (kept := self._alive()):
            return OUTSIDE
        known = sizes()
        found = sorted((each for each in kept if each.samples in known), key=lambda each: each.samples)
        if len({each[:2] for each in found}) > 1:
            self._warn()
        return found[-1] if found else OUTSIDE

    def _of_broken_off(self, sizes: Callable[[], Collection[int]]) -> Weighed | None:
        """The batch of a backward pass that follows passes left early, for example with ``next(iter(loader))``.

        The script's own data, the same on all ranks, may be weighted like this too, because the average does not change. A sum would.
        """
        batches = self._broken_off
        if not batches:
            return None
        averaged = batches[-1].loss_factor == 1.0
        if averaged and len({each[:2] for each in batches}) == 1:
            return batches[-1]
        known = sizes()
        found = [each for each in batches if each.samples in known] or (batches if averaged else ())
        if len({each[:2] for each in found}) > 1:
            self._warn()
        return found[-1] if found else None

    def _alive(self) -> set[Weighed]:
        """The batches that the script has kept. Its variables always hold the tensors of the last batch of a pass too."""
        self._drawn = deque((each for each in self._drawn if each[0]() is not None), maxlen=MOST_KEPT)
        counts = Counter(id(reading) for _, reading, _ in self._drawn)
        return {batch for _, reading, batch in self._drawn if counts[id(reading)] > 1}

    def _chosen(self, readings: list[Reading], sizes: Callable[[], Collection[int]]) -> Weighed:
        last = readings[-1]
        batches = last.candidates()
        expected = batches[0 if last.ahead else -1]
        batches += [each for reading in readings[:-1] if reading.new for each in reading.candidates()]
        if len({each[:2] for each in batches}) == 1:
            return expected  # usually true
        known = sizes()
        found = {each.samples: each for each in (*batches, expected) if each.samples in known}
        if len({each[:2] for each in found.values()}) == 1:
            return found.popitem()[1]
        if len(found) > 1 or not (found or last.ahead):
            self._warn()
        return expected

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            warn(
                f"parwrap: it is unclear which batch the loss at {location()} belongs to: it may cover several batches, or one of "
                "several that the script kept. This rank's parts of these batches have different weights, for example because the last "
                "batch is smaller, and one of the weights is used. Set drop_last=True in the DataLoader, or divide by the count over all "
                "ranks: parwrap.mean_over_ranks(loss_sum, count). This is shown once."
            )
