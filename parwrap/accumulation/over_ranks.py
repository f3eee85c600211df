"""Averages the open windows of several ranks with each other, or with the backward pass that closes the window of other ranks.

A rank that leaves its loop first may have an open window while other ranks still fill theirs. While it waits, it adds its sums to the
backward passes that close those windows, and takes the same steps. Sums that remain when all ranks wait are averaged among these ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import utils

from parwrap.accumulation.applied_window import Applied, clips_of, mean_of
from parwrap.accumulation.sums import Asked, merged
from parwrap.group.group import Group
from parwrap.intercept.backward import Backward
from parwrap.intercept.clipping import Clip
from parwrap.loop.batch_weights import Weighed
from parwrap.loop.loop_state import Loop
from parwrap.strategies.common.share import Share
from parwrap.strategies.common.strategy import Strategy

__all__ = ["OverRanks"]

WINDOW = "an open window of batches"
LEARNED = "what the loop does between two steps"

Number = tuple[int, int]


class _WindowReport(NamedTuple):
    """A rank's report on its open window. It identifies parameters and optimizers by the loop's numbers, which are the same on all ranks.

    Attributes:
        kinds: the shape, dtype and sparsity of each sum.
        optimizers: the optimizers whose steps were skipped, in order.
        clips: the function of each clip, its parameters and its other arguments.
    """

    kinds: dict[Number, tuple[tuple[int, ...], torch.dtype, bool]]
    optimizers: list[int]
    clips: list[tuple[str, list[Number], tuple, dict[str, Any]]]


class OverRanks:
    """Applies windows together with the other ranks.

    Args:
        group: the ranks.
        loop: the loop state, which numbers parameters and optimizers.
        strategy: how they train together.
    """

    def __init__(self, group: Group, loop: Loop, strategy: Strategy) -> None:
        self._group, self._loop, self._strategy = group, loop, strategy
        self._answered = 0
        group.coordinator.answer(WINDOW, lambda detail, present: self._answer(present))
        group.coordinator.answer(LEARNED, lambda detail, present: group.share(LEARNED, None, present))

    @property
    def averages_gradients(self) -> bool:
        """Whether gradients are now averaged over the ranks."""
        return self._strategy.averages_gradients

    def batch(self, call: Backward) -> Weighed:
        """The batch of ``call``, with the weight of this rank's part of it."""
        return self._loop.weights.find(call.tensors)

    @property
    def next_sync_point(self) -> int:
        """The number of the next sync point of the ranks."""
        return self._group.coordinator.number

    def with_gradients(self) -> list[torch.Tensor]:
        """The parameters of optimizers that have a gradient and are trained."""
        return [p for p in self._loop.once_owned().values() if p.requires_grad and p.grad is not None]

    def taken(self) -> Asked:
        """Their gradients, which are removed from them."""
        asked = Asked(None)
        asked.sums.take(self.with_gradients())
        return asked

    def owns(self, leaves: Iterable[torch.Tensor]) -> bool:
        """Whether every one of ``leaves`` is a parameter of an optimizer."""
        return {id(leaf) for leaf in leaves} <= {id(p) for p in self._loop.owned().values()}

    def compared(self, learned: Hashable) -> set[Hashable] | None:
        """The pattern that each rank has ``learned``, or ``None`` if not all have come."""
        views = self._group.exchange(LEARNED, learned)
        return set(views.values()) if len(views) == self._group.world.size else None

    def applied(self, several: list[Asked], weight: float, share: Callable[[], Share]) -> Applied:
        """Synchronize with the other ranks, and apply the windows of all ranks that take part.

        Args:
            several: the skipped steps.
            weight: the part of a window that they cover.
            share: a function that returns this rank's share in backward passes that other ranks run before this sync point.
        """
        if not self.averages_gradients:
            return Applied(mean_of(several, weight or 1.0), clips_of(several), [asked.optimizer for asked in several if asked.optimizer])
        self._strategy.share = share
        try:
            present = self._group.synchronize(WINDOW)
        finally:
            self._strategy.share = Share
        report = self._report(several)
        views = list(self._group.share(WINDOW, report, present).values())
        gradients = self._mean(views, {id(p): total for p, total in merged(several).values()}, weight if several else 0.0)
        parameters, optimizers = self._loop.once_owned(), dict(self._loop.numbered_optimizers())
        clips = [
            Clip(name, [parameters[number] for number in numbers if number in parameters], args, kwargs, getattr(utils, name))
            for name, numbers, args, kwargs in next((view.clips for view in views if view.clips), [])
        ]
        steps = dict.fromkeys(number for view in views for number in view.optimizers)
        return Applied(
            [(parameters[number], gradient) for number, gradient in gradients.items() if number in parameters],
            clips,
            [optimizers[number] for number in steps if number in optimizers],
            self._strategy.averaged,
        )

    def in_step(self, several: list[Asked], weight: float, scaler: torch.amp.GradScaler | None) -> Callable[[], Share]:
        """Adds ``several`` to the backward passes that close the windows of others, steps as this rank's loop would, and removes them."""
        self._answered = 0
        return partial(self._share, several, weight, scaler)

    def given(self, several: list[Asked], weight: float) -> Callable[[], Share]:
        """Adds ``several`` to the next backward pass of other ranks, and removes them."""

        def share() -> Share:
            gradients = {key: total for key, (_, total) in merged(several).items()}
            several.clear()
            return Share(weight, gradients) if gradients else Share()

        return share

    def _answer(self, present: list[int]) -> None:
        """Answer ranks that apply their windows while this rank waits for something else. This rank misses that step."""
        views = list(self._group.share(WINDOW, None, present).values())
        if self._mean(views, {}, 0.0):
            self._group.coordinator.miss()

    def _report(self, several: Sequence[Asked]) -> _WindowReport:
        number_of = {id(p): number for number, p in self._loop.once_owned().items()}
        optimizer_number = {id(optimizer): number for number, optimizer in self._loop.numbered_optimizers()}
        kinds = {number_of[key]: (tuple(total.shape), total.dtype, total.is_sparse) for key, (_, total) in merged(several).items()}
        clips = [
            (clip.name, [number_of[id(p)] for p in clip.parameters if id(p) in number_of], clip.args, clip.kwargs)
            for clip in clips_of(several)
        ]
        return _WindowReport(kinds, [optimizer_number[id(asked.optimizer)] for asked in several if asked.optimizer], clips)

    def _mean(self, views: Sequence[_WindowReport], mine: dict[int, torch.Tensor], weight: float) -> dict[Number, torch.Tensor]:
        """The means of all sums in the ranks' reports."""
        kinds = {number: kind for view in views for number, kind in view.kinds.items()}
        if not kinds:
            return {}
        parameters: dict[Number, Any] = self._loop.once_owned()
        sums = [
            mine[id(parameters.get(number))].to_dense()
            if id(parameters.get(number)) in mine
            else torch.zeros(shape, dtype=dtype, device=self._group.device)
            for number, (shape, dtype, _) in sorted(kinds.items())
        ]
        totals, weights = self._strategy.summed(sums, weight)
        means: dict[Number, torch.Tensor] = {}
        for (number, (_, _, sparse)), total, own in zip(sorted(kinds.items()), totals, sums, strict=True):
            mean = (total / weights).to(own)
            means[number] = mean.to_sparse(1) if sparse else mean
        return means

    def _share(self, several: list[Asked], weight: float, scaler: torch.amp.GradScaler | None) -> Share:
        """This rank's share of the next backward that closes the window of others, in the order of its own loop."""
        due = [asked for asked in several if asked.at == self._answered]
        self._answered += 1
        gradients = {key: total for key, (_, total) in merged(due).items()}
        clips = clips_of(due)

        def averaged() -> bool:
            in_step = bool(several)
            if due:
                means = [(p, p.grad) for p in self._loop.once_owned().values() if id(p) in gradients and p.grad is not None]
                Applied(means, clips, [asked.optimizer for asked in due if asked.optimizer]).run(scaler)
            several[:] = [asked for asked in several if asked not in due]
            return in_step

        if not due:
            return Share(averaged=averaged)
        for p in self._loop.once_owned().values():
            p.grad = gradients.get(id(p))  # others may ask for parameters that are in no set
        return Share(weight, gradients, averaged)
