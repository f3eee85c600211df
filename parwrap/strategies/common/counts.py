"""Sums of the ranks' counts, such as tokens; a rank that has left the loop counts nothing."""

from __future__ import annotations

import torch

from parwrap.group.collectives import all_reduced
from parwrap.group.group import Group
from parwrap.loop.loop_state import Loop
from parwrap.strategies.common.autograd_graph import leading_sizes

__all__ = ["Counts"]

COUNT = "parwrap.mean_over_ranks"


class Counts:
    """Counts over the ranks of ``group``.

    Args:
        group: the process group.
        loop: knows the weight of this rank's part of the running batch.
    """

    def __init__(self, group: Group, loop: Loop) -> None:
        self._group, self._loop = group, loop
        group.coordinator.answer(COUNT, lambda detail, present: self._summed(0.0, 0.0))

    def mean_factor(self, count: float, loss_sum: torch.Tensor) -> tuple[float, float]:
        """Factor that makes the average of the ranks' loss sums the global mean, and the total count.

        Args:
            count: the number of tokens or samples in the sum.
            loss_sum: the sum of their losses.
        """
        self._group.synchronize(COUNT)
        weight = self._loop.weights.upcoming(lambda: leading_sizes([loss_sum])).weight
        total, weights = self._summed(count if weight else 0.0, weight)
        return (weights / (total * weight) if total and weight else 0.0), total

    def _summed(self, count: float, weight: float) -> list[float]:
        return all_reduced([torch.tensor([count, weight], dtype=torch.float64)], self._group)[0].tolist()
