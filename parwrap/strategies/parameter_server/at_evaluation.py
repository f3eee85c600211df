"""What workers of parameter servers do together when evaluation starts: they have one model, that of the lowest rank that is there.

They do it by way of a server, and tell numbers by the store: nothing here is a collective, which a worker that has died would break.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from parwrap.group.group import Group, is_alone
from parwrap.intercept.interceptor import intercepts
from parwrap.loop.loop_state import Loop
from parwrap.strategies.common.in_step import EVALUATION, METRIC, InStep
from parwrap.strategies.parameter_server.worker import Worker

__all__ = ["AtEvaluation"]


class AtEvaluation(InStep):
    """Keeps workers in step where their own numbers would lead them apart.

    Args:
        group: the workers.
        loop: what the training loop has done so far.
        pushing: leads to the servers.
    """

    def __init__(self, group: Group, loop: Loop, pushing: Worker) -> None:
        super().__init__(group, loop)
        self._pushing = pushing
        group.coordinator.answer(EVALUATION, lambda detail, present: None)
        group.coordinator.answer(METRIC, lambda detail, present: None)

    @intercepts
    def closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        return closure

    @intercepts
    def metric(self, metric: Any) -> Any:
        """The mean over the workers that are there, or learning rates drift apart."""
        if is_alone():
            return metric
        told = self._group.exchange(METRIC, float(metric))
        return sum(told.values()) / len(told)

    @intercepts
    def set_mode(self, module: nn.Module, training: bool) -> None:
        """When a root is set to eval after training, its parameters and buffers become those of the lowest rank."""
        modules = [] if training or is_alone() else self._loop.evaluated_with(module)
        if all(self._synced.get(each, (0, 0)) == self._seen() for each in modules):
            return
        for each in modules:
            self._synced[each] = self._seen()
        source = min(self._group.synchronize(EVALUATION))
        held = (tensor for each in modules for tensor in (*each.parameters(), *each.buffers()))
        tensors = [tensor for tensor in held if tensor.layout == torch.strided]
        topic = self._group.key(EVALUATION)
        if self._group.world.rank == source:
            self._pushing.pull()
            self._pushing.give(topic, [tensor.detach().cpu() for tensor in tensors])
            return
        with torch.no_grad():
            for tensor, value in zip(tensors, self._pushing.get(topic), strict=True):
                tensor.data.copy_(value)
        self._pushing.taken_over()
