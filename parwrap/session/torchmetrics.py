"""Keeps torchmetrics correct for loaders that every rank reads completely: such a metric is complete on each rank, so it is not summed.

``compute()`` sums the states of all ranks. That is right for a training pass, where each rank has a share. In an evaluation that every rank
reads whole, a sum, a confusion matrix or a count would be multiplied by the number of ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from parwrap.intercept.interceptor import Interceptor, intercepts
from parwrap.loop.loop_state import Loop

__all__ = ["Metrics"]


class Metrics(Interceptor):
    """Records for each metric whether all batches since its reset were the same on all ranks.

    Args:
        loop: the loop state, which knows how batches are read.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._whole: dict[int, tuple[weakref.ref[Any], bool]] = {}  # by id: the hash of a metric changes with its states

    @intercepts
    def update_metric(self, metric: Any) -> None:
        whole = self._loop.reads_whole()
        if metric.update_count:
            whole = whole and not self.syncs_metric(metric)
        self._note(metric, whole)

    @intercepts
    def share_states(self, members: Sequence[Any]) -> None:
        """Record that the first of ``members`` was updated for all of them."""
        if noted := self._whole.get(id(members[0])):
            for metric in members[1:]:
                self._note(metric, noted[1])

    @intercepts
    def syncs_metric(self, metric: Any) -> bool:
        """Whether ranks have different parts of the data of ``metric``, as far as is known."""
        known, whole = self._whole.get(id(metric), (None, False))
        return not (whole and known is not None and known() is metric)

    def _note(self, metric: Any, whole: bool) -> None:
        key = id(metric)
        self._whole[key] = weakref.ref(metric, lambda gone: self._whole.pop(key, None)), whole
