"""Tracks the weight of this rank's part of each batch, in an average over ranks, until the backward pass of that batch.

Most loops draw a batch and run its backward passes before they draw another. With a prefetcher, which is some batches ahead, the order of
draws or the tensor sizes in the graph identify the batch of a backward pass. Sizes are read only if the candidates have different weights.
They also identify the batch where a loop trains again on kept batches, as with ``itertools.cycle``. If the loop leaves a pass before it
trains on the batch, for example with ``next(iter(loader))``, the backward passes that follow belong to that batch. Where sizes leave a
doubt, the batch is that whose tensors the graph has saved.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch.autograd.graph import GradientEdge

from parwrap.coordination.call_site import location, warn
from parwrap.loop.autograd_graph import leading_sizes, saved_of

__all__ = ["BatchWeights", "Reading", "Weighed"]

MOST_AHEAD = 64
"""The number of batches to remember of a pass."""

MOST_KEPT = 4096
"""The number of kept batches to search."""

Losses = Iterable[torch.Tensor | GradientEdge]
"""What a backward starts from. A tensor without a graph stands for a loss that is not known yet, and has its first dimension."""


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


class DrawnBatch(NamedTuple):
    """A batch, the pass that has yielded it, and its tensors as far as the script keeps them."""

    references: list[weakref.ref[torch.Tensor]]
    reading: Reading
    batch: Weighed

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that are still there."""
        return [tensor for each in self.references if (tensor := each()) is not None]


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
        self._drawn: deque[DrawnBatch] = deque(maxlen=MOST_KEPT)
        self._broken_off: tuple[Weighed, ...] = ()  # batches of passes that were left early, without a backward pass inside
        self._trained_after = False
        self._warned = False

    @property
    def number(self) -> int:
        """The position of the current batch in its pass, the same on all ranks, if ranks split the batch; otherwise 0."""
        reading = self._readings[-1] if self._readings else None
        return reading.drawn if reading and self.current.split and not reading.by_thread else 0

    def draw(self, reading: Reading, batch: Weighed, tensors: Iterable[torch.Tensor] = ()) -> None:
        """A pass has yielded ``batch``, which consists of ``tensors``."""
        self._readings = [each for each in self._readings if each.open and each is not reading] + [reading]
        reading.drawn += 1
        reading.by_thread |= threading.current_thread() is not threading.main_thread()
        reading.batches.append(batch)
        if references := [weakref.ref(tensor) for tensor in tensors if _has_address(tensor)]:
            self._drawn.append(DrawnBatch(references, reading, batch))
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

    def find(self, losses: Losses) -> Weighed:
        """The batch of the backward of ``losses`` that is about to run."""
        if self._readings:
            for reading in self._readings:
                reading.run_backward()
            self.current = self._chosen(self._readings, losses)
            self._readings = [each for each in self._readings if each.open or each.waits]
            self._broken_off = ()
        else:
            self.current = self._kept(losses)
            self._trained_after = True
        return self.current

    def upcoming(self, losses: Losses) -> Weighed:
        """The result of :meth:`find` for the next backward."""
        readings = [replace(each) for each in self._readings]
        for reading in readings:
            reading.run_backward()
        return self._chosen(readings, losses) if readings else self._kept(losses)

    def check_kept(self) -> None:
        """Called when gradients are used that no backward pass computed: outside of all passes, their batch is unknown."""
        if not self._readings and self._differ and not self._broken_off:
            self._warn()

    def _kept(self, losses: Losses) -> Weighed:
        """The batch of a backward pass outside of all passes over loaders: a kept batch of a finished pass, or none."""
        if not (self._differ or self._split):
            return OUTSIDE  # usually true
        if batch := self._of_broken_off(losses):
            return batch
        if not (kept := self._alive()):
            return OUTSIDE
        sizes = leading_sizes(losses)
        found = sorted({each.batch for each in kept if each.batch.samples in sizes}, key=lambda batch: batch.samples)
        if _differ(found):
            return self._saved(losses, kept) or self._doubtful(found[-1])
        return found[-1] if found else OUTSIDE

    def _of_broken_off(self, losses: Losses) -> Weighed | None:
        """The batch of a backward pass that follows passes left early, for example with ``next(iter(loader))``.

        The script's own data, the same on all ranks, may be weighted like this too, because the average does not change. A sum would.
        """
        batches = self._broken_off
        if not batches:
            return None
        averaged = batches[-1].loss_factor == 1.0
        if averaged and not _differ(batches):
            return batches[-1]
        sizes = leading_sizes(losses)
        found = [each for each in batches if each.samples in sizes] or (batches if averaged else ())
        if _differ(found):
            return self._saved(losses, self._drawn) or self._doubtful(found[-1])
        return found[-1] if found else None

    def _alive(self) -> list[DrawnBatch]:
        """The batches that the script has kept. Its variables always hold the tensors of the last batch of a pass too."""
        self._drawn = deque((each for each in self._drawn if each.tensors()), maxlen=MOST_KEPT)
        counts = Counter(id(each.reading) for each in self._drawn)
        return [each for each in self._drawn if counts[id(each.reading)] > 1]

    def _chosen(self, readings: list[Reading], losses: Losses) -> Weighed:
        last = readings[-1]
        batches = last.candidates()
        expected = batches[0 if last.ahead else -1]
        batches += [each for reading in readings[:-1] if reading.new for each in reading.candidates()]
        if not _differ(batches):
            return expected  # usually true
        sizes = leading_sizes(losses)
        found = {each.samples: each for each in (*batches, expected) if each.samples in sizes}
        if len({each[:2] for each in found.values()}) == 1:
            return found.popitem()[1]
        if len(found) > 1 or not (found or last.ahead):
            return self._saved(losses, self._drawn) or self._doubtful(expected)
        return expected

    def _saved(self, losses: Losses, drawn: Iterable[DrawnBatch]) -> Weighed | None:
        """The only one of the batches ``drawn`` of which the graph of ``losses`` has saved a tensor for its backward."""
        places = [(first, end, each.batch) for each in drawn for first, end in map(_place, each.tensors())]
        saved = [tensor.data_ptr() for tensor in saved_of(losses) if _has_address(tensor)]
        found = {batch for first, end, batch in places if any(first <= address < end for address in saved)}
        return found.pop() if len({batch[:2] for batch in found}) == 1 else None

    def _doubtful(self, batch: Weighed) -> Weighed:
        """Use ``batch``, and warn that it may be another."""
        self._warn()
        return batch

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            warn(
                f"parwrap: it is unclear which batch the loss at {location()} belongs to: it may cover several batches, or one of "
                "several that the script kept. This rank's parts of these batches have different weights, for example because the last "
                "batch is smaller, and one of the weights is used. Set drop_last=True in the DataLoader, or divide by the count over all "
                "ranks: parwrap.mean_over_ranks(loss_sum, count). This is shown once."
            )


def _differ(batches: Iterable[Weighed]) -> bool:
    """Whether ``batches`` have different weights."""
    return len({batch[:2] for batch in batches}) > 1


def _has_address(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is in one place in memory; a sparse one is not."""
    return tensor.layout == torch.strided


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first byte of ``tensor`` and of the byte after it."""
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
