"""The running window of batches: where the loop is in it, and the weight of each batch, also in a smaller last window.

A batch ends when a step has followed its backward, and another is drawn from a loader or the same place calls backward again. Nothing is
run or sent here.
"""

from __future__ import annotations

__all__ = ["Window"]


class Window:
    """A window of at most ``steps`` batches, and the position of the running batch in it.

    Attributes:
        steps: the batches of a full window.
        batches: the finished batches of this window.
        backwards: the number of backward passes in the running batch.
        closing: whether the running batch is the last of its window; known at its first backward pass.

    >>> window = Window(steps=2)
    >>> window.begin(closing=False); window.factor
    0.5
    >>> window.end(); window.full
    True
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._counted: float | None = None
        self._before: dict[tuple, set[tuple]] = {}
        self._sites: dict[tuple, None] = {}
        self.begin_window()

    def begin_window(self) -> None:
        """Begin another window, without a batch yet."""
        self.batches = 0
        self._size, self._weight = 0.0, 0.0
        self._reference: float | None = None
        self.begin_batch()

    def begin_batch(self) -> None:
        """Begin another batch, without a backward pass yet."""
        if self._sites:
            self._before[next(iter(self._sites))] = {*self._sites}
        self.backwards, self.closing = 0, False
        self._relative, self._own_weight, self._loss_factor = 1.0, 1.0, 1.0
        self._sites = {}
        self._followed: set[tuple] = set()
        self._drawn_after: set[tuple] = set()

    @property
    def asked(self) -> bool:
        """Whether the loop has called ``step`` in the running batch."""
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
        """Set the weight of the next batch to ``total``, its number of tokens or samples on all ranks together."""
        if self._counted is None:
            self._counted = total

    def drew(self) -> None:
        """Forget the last count, because it belonged to another batch."""
        self._counted = None
        self._drawn_after.update(self._sites)

    def begin(self, closing: bool, weight: float = 1.0, part: float = 1.0, loss_factor: float = 1.0) -> None:
        """Begin the running batch at its first backward pass.

        Args:
            closing: whether the batch is the last of its window.
            weight: the weight of this rank's part in an average over ranks.
            part: the batch's number of samples as a fraction of a full batch, unless :meth:`count` has set its weight.
            loss_factor: the factor of its loss besides the weight.
        """
        self._relative = part
        if self._counted:
            self._reference = self._reference or self._counted
            self._relative = self._counted / self._reference
        self._counted = None
        self._own_weight, self._loss_factor, self.closing = weight, loss_factor, closing
        self._size += self._relative
        self._weight += self._relative * weight

    def take_back(self) -> None:
        """Remove the running batch from the window, and begin another."""
        self._size -= self._relative
        self._weight -= self._relative * self._own_weight
        self.begin_batch()

    def ran_backward(self, site: tuple) -> None:
        self.backwards += 1
        self._sites[site] = None

    def step(self) -> None:
        """Record that the loop has called ``step`` of an optimizer."""
        self._counted = None
        self._followed.update(self._sites)

    def over(self, site: tuple) -> bool:
        """Whether a backward at ``site`` belongs to another batch than the last one."""
        return site in self._followed

    def is_new(self, site: tuple) -> bool:
        """Whether an earlier batch that began like this one had no backward at ``site``."""
        first = next(iter(self._sites), None)
        return site not in self._sites and first in self._before and site not in self._before[first]

    def left(self, site: tuple) -> bool:
        """Whether a backward at ``site`` has run, and more was drawn since, but no step has followed."""
        return site in self._drawn_after

    def end(self) -> None:
        """End the running batch and continue the window with the next one."""
        self.batches += 1
        self.begin_batch()

    @property
    def factor(self) -> float:
        """The factor for the loss of the running batch."""
        return self._relative * self._own_weight * self._loss_factor / (self._size if self.closing else self.steps)

    @property
    def correction(self) -> float:
        """The factor for the gradients of earlier batches when the window closes: it may be smaller than a full one."""
        return self.steps / self._size

    @property
    def rank_weight(self) -> float:
        """The weight of this rank in the average over ranks when the window closes."""
        return self._weight / self._size

    @property
    def open_weight(self) -> float:
        """How full the window is on this rank. A batch that was left before its step does not count."""
        left = self.backwards > 0 and not (self._followed or self.closing)
        return (self._weight - left * self._relative * self._own_weight) / self.steps
