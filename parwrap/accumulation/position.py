"""Where in a window of batches the loop is, and how much each batch counts in it.

A batch is over when a step has followed its backward, and another is drawn from a loader or the same place calls backward again. Nothing is
run or sent here.
"""

from __future__ import annotations

__all__ = ["Position"]


class Position:
    """The place of the running batch in a window of at most ``steps``.

    Attributes:
        steps: the batches of a full window.
        batches: those of this window that are over.
        backwards: how many have run in the running batch.
        closing: whether it is the last of its window; known at its first backward.

    >>> position = Position(steps=2)
    >>> position.begin(closing=False); position.factor
    0.5
    >>> position.end(); position.full
    True
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._told: float | None = None
        self._before: dict[tuple, set[tuple]] = {}
        self._sites: dict[tuple, None] = {}
        self.begin_window()

    def begin_window(self) -> None:
        """Another window, of which there is no batch yet."""
        self.batches = 0
        self._size, self._weight = 0.0, 0.0
        self._reference: float | None = None
        self.begin_batch()

    def begin_batch(self) -> None:
        """Another batch, in which there was no backward yet."""
        if self._sites:
            self._before[next(iter(self._sites))] = {*self._sites}
        self.backwards, self.closing = 0, False
        self._relative, self._own_weight, self._loss_factor = 1.0, 1.0, 1.0
        self._sites = {}
        self._followed: set[tuple] = set()
        self._drawn_after: set[tuple] = set()

    @property
    def asked(self) -> bool:
        """Whether a step was asked for in the running batch."""
        return bool(self._followed)

    @property
    def is_open(self) -> bool:
        """Whether a backward has run in this window."""
        return bool(self.batches or self.backwards)

    @property
    def full(self) -> bool:
        """Whether the running batch is the last that fits into the window."""
        return self.batches + 1 >= self.steps

    def count(self, total: float) -> None:
        """The next batch holds ``total`` tokens or samples on all ranks together, and counts by them."""
        if self._told is None:
            self._told = total

    def drew(self) -> None:
        """What was counted before was of another batch."""
        self._told = None
        self._drawn_after.update(self._sites)

    def begin(self, closing: bool, weight: float = 1.0, part: float = 1.0, loss_factor: float = 1.0) -> None:
        """The first backward of the batch is about to run.

        Args:
            closing: whether the batch is the last of its window.
            weight: how much this rank's part of it counts in an average over ranks.
            part: how many samples it has, in full batches, unless :meth:`count` has told better.
            loss_factor: what its loss is multiplied by beside the weight.
        """
        self._relative = part
        if self._told:
            self._reference = self._reference or self._told
            self._relative = self._told / self._reference
        self._told = None
        self._own_weight, self._loss_factor, self.closing = weight, loss_factor, closing
        self._size += self._relative
        self._weight += self._relative * weight

    def take_back(self) -> None:
        """There is no running batch yet."""
        self._size -= self._relative
        self._weight -= self._relative * self._own_weight
        self.begin_batch()

    def ran_backward(self, site: tuple) -> None:
        self.backwards += 1
        self._sites[site] = None

    def step(self) -> None:
        """An optimizer was asked to step."""
        self._told = None
        self._followed.update(self._sites)

    def over(self, site: tuple) -> bool:
        """Whether a backward that is called at ``site`` belongs to another batch than the last did."""
        return site in self._followed

    def is_new(self, site: tuple) -> bool:
        """Whether an earlier batch that began where this one did had no backward at ``site``."""
        first = next(iter(self._sites), None)
        return site not in self._sites and first in self._before and site not in self._before[first]

    def left(self, site: tuple) -> bool:
        """Whether a backward at ``site`` has run, and more was drawn since, but no step has followed."""
        return site in self._drawn_after

    def end(self) -> None:
        """The running batch is over, and the window goes on."""
        self.batches += 1
        self.begin_batch()

    @property
    def factor(self) -> float:
        """The factor for the loss of the running batch."""
        return self._relative * self._own_weight * self._loss_factor / (self._size if self.closing else self.steps)

    @property
    def correction(self) -> float:
        """By which gradients of earlier batches are to be multiplied when the window closes: it may be smaller than a full one."""
        return self.steps / self._size

    @property
    def rank_weight(self) -> float:
        """How much this rank counts in the average over ranks when the window closes."""
        return self._weight / self._size

    @property
    def open_weight(self) -> float:
        """How much of a full window there is on this rank; a batch that was left before its step does not count."""
        left = self.backwards > 0 and not (self._followed or self.closing)
        return (self._weight - left * self._relative * self._own_weight) / self.steps
