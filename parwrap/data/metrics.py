"""Keeps torchmetrics correct for data that every rank reads whole: such a metric is complete on each rank, so its states are not summed.

``compute()`` sums the states of all ranks. That is right for shares: of training passes and of ``@evaluate``. After a pass that every rank
reads whole, a sum, a confusion matrix or a count would be multiplied by the number of ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from parwrap.intercept.interceptor import Interceptor
from parwrap.loop.passes import Passes

__all__ = ["Metrics"]


class Metrics(Interceptor):
    """Records for each metric whether all batches since its reset were the same on all ranks.

    Args:
        passes: the open passes.
    """

    def __init__(self, passes: Passes) -> None:
        self._passes = passes
        self._whole: dict[int, tuple[weakref.ref[Any], bool]] = {}  # by id: the hash of a metric changes with its states

    def update_metric(self, metric: Any, update: Callable[[], Any]) -> Any:
        innermost = self._passes.innermost
        whole = innermost is not None and not innermost.shared
        if metric.update_count:
            whole = whole and not self.syncs_metric(metric)
        self._note(metric, whole)
        return update()

    def share_states(self, members: Sequence[Any]) -> None:
        if noted := self._whole.get(id(members[0])):
            for metric in members[1:]:
                self._note(metric, noted[1])

    def syncs_metric(self, metric: Any) -> bool:
        known, whole = self._whole.get(id(metric), (None, False))
        return not (whole and known is not None and known() is metric)

    def _note(self, metric: Any, whole: bool) -> None:
        key = id(metric)
        self._whole[key] = weakref.ref(metric, lambda gone: self._whole.pop(key, None)), whole
