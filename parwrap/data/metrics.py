"""Keeps torchmetrics correct for data that every rank reads whole: such a metric is complete on each rank, so its states are not summed.

``compute()`` sums the states of all ranks. That is right for shares: of training passes and of ``@evaluate``. After a pass that every rank
reads whole, a sum, a confusion matrix or a count would be multiplied by the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.weak import WeakIdKeyDictionary

from parwrap.intercept.interceptor import Interceptor
from parwrap.loop.passes import Passes

__all__ = ["Metrics"]


class Metrics(Interceptor):
    """Records for each metric whether all batches since its reset were the same on all ranks.

    Args:
        passes: the open passes.
        always_whole: whether they are so in all passes, as with ``batch="whole"``.
    """

    def __init__(self, passes: Passes, always_whole: bool = False) -> None:
        self._passes, self._always = passes, always_whole
        self._whole: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by identity: the hash of a metric changes with its states

    def update_metric(self, metric: Any, update: Callable[[], Any]) -> Any:
        innermost = self._passes.innermost
        whole = self._always or (innermost is not None and not innermost.shared)
        if metric.update_count:
            whole = whole and not self.syncs_metric(metric)
        self._whole[metric] = whole
        return update()

    def share_states(self, members: Sequence[Any]) -> None:
        if members[0] in self._whole:
            for metric in members[1:]:
                self._whole[metric] = self._whole[members[0]]

    def syncs_metric(self, metric: Any) -> bool:
        return not self._whole.get(metric, False)
