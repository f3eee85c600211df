"""Weights that a script changes differently on each rank, for example with noise (SGLD): all ranks use rank 0's weights for each batch.

Averaged gradients keep weights the same over steps. Values added to weights or gradients from each rank's random streams do not. Weights
are compared at the second backward of each place, and from the 16th sync point on in backward passes whose number is a power of two. Once
they differ, all ranks copy rank 0's before each batch of a training pass, so that all use its noise. A hand-written loop copies them in its
backward, after the forward: that gradient comes from each rank's own weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from parwrap.coordination.call_site import location, warn
from parwrap.coordination.status_board import PART
from parwrap.group.group import Group, is_alone
from parwrap.loop.loop_state import Loop
from parwrap.strategies.common.agreement import Described, described
from parwrap.strategies.common.parameter_broadcast import take_values
from parwrap.strategies.common.sent_values import copy_from, kind_of

__all__ = ["Following"]

COMPARED = "weights that should be the same"
FOLLOWED = "rank 0's weights"
RATES = "learning rates"

FIRST_LOOK = 16
"""The number of the sync point from which weights are compared; then at each power of two."""

Number = tuple[int, int]

Rates = dict[int, list[float]]
"""The learning rates of the groups of each optimizer, by its number."""


class Following:
    """Synchronizes weights that a script changes directly.

    Args:
        group: the ranks.
        loop: the loop state, which numbers the parameters.
        take_state: a function that copies all of another rank's state to this rank.

    Attributes:
        due: the number of the sync point at which the next :meth:`look` is due.
    """

    def __init__(self, group: Group, loop: Loop, take_state: Callable[[int], None]) -> None:
        self._group, self._loop, self._take_state = group, loop, take_state
        self._follows, self.due = False, self._at(FIRST_LOOK)
        group.coordinator.answer(COMPARED, lambda detail, present: self._compare(present))
        group.coordinator.answer(FOLLOWED, lambda detail, present: self._take(present))

    def look(self) -> None:
        """A backward is about to run, and :attr:`due` is reached: compare weights, at a sync point with the same number on all ranks."""
        if not self._follows:
            self._compare(self._group.synchronize(COMPARED))
        if self._follows and not self._loop.passes:
            self._follow()

    def drifted(self) -> None:
        """Handle weights that have begun to differ: warn, and copy rank 0's weights from now on."""
        if self._follows:
            return
        self._follows, self.due = True, 0
        self._loop.drew = self._follow
        rates = self._group.share(RATES, self._rates(), range(self._group.world.size))
        places = ((number, group) for number, first in rates[0].items() for group in range(len(first)))
        apart = next((place for place in places if _differ(rates, *place)), None)
        if apart:
            self._warn_of_rates(rates, *apart)
            return
        warn(
            f"parwrap: the weights differ between ranks before the backward pass at {location()}, although gradients are averaged: each "
            "rank adds its own noise to weights or gradients (SGLD), or one rank steps on its own, for example depending on "
            "random.random(). From now on, all ranks copy rank 0's weights before each batch, which costs time. Draw noise from a "
            "generator with the same seed on all ranks: create g = torch.Generator().manual_seed(0) before the loop, and call "
            "torch.randn(p.shape, generator=g) in it. Use parwrap.broadcast(decision) to decide for all ranks. This is shown once."
        )

    def _warn_of_rates(self, rates: dict[int, Rates], number: int, group: int) -> None:
        each = ", ".join(f"{view[number][group]:.4g} on rank {rank}" for rank, view in rates.items() if len(view.get(number, ())) > group)
        warn(
            f"parwrap: the weights differ between ranks before the backward pass at {location()}, because the learning rates differ: "
            f"{each}. Each rank sets its learning rate from a value that only it has, such as its part of the loss. From now on, all "
            "ranks copy rank 0's weights and learning rates before each batch, which costs time. Compute the learning rate from "
            "parwrap.reduce_mean(loss), or use parwrap.broadcast(lr). This is shown once."
        )

    def _rates(self) -> Rates:
        """The learning rates of each optimizer's groups."""
        return {n: [float(group.get("lr") or 0.0) for group in each.param_groups] for n, each in self._loop.numbered_optimizers()}

    def _take_rates(self, rates: Rates) -> None:
        for number, optimizer in self._loop.numbered_optimizers():
            for group, rate in zip(optimizer.param_groups, rates.get(number, ()), strict=False):
                if isinstance(group.get("lr"), torch.Tensor):
                    group["lr"].fill_(rate)
                elif group.get("lr") is not None:
                    group["lr"] = rate

    def _follow(self) -> None:
        if not is_alone() and threading.current_thread() is threading.main_thread() and not self._loop.evaluations:
            self._take(self._group.synchronize(FOLLOWED))

    def _at(self, count: int) -> int:
        """The number of the ``count``-th sync point in this part of the run."""
        return (self._group.coordinator.part << PART) + count

    def _compare(self, present: list[int]) -> None:
        number = self._group.coordinator.number - self._at(0)
        self.due = 0 if self._follows else self._at(1 << number.bit_length())
        source, owned = min(present), self._loop.once_owned()
        gathered = self._group.share(COMPARED, dict(zip(owned, described(owned.values()), strict=True)), present)
        by_number = {n: [view[n] for view in gathered.values()] for n in sorted(set.intersection(*map(set, gathered.values())))}
        different = [n for n, each in by_number.items() if len({of.checksum for of in each}) > 1 and len({of.kind for of in each}) == 1]
        # a rank that waits for something else may have fewer
        if different and take_values([self._own(n, gathered[source][n], owned) for n in different], source, self._group):
            self.drifted()
            self._take_state(source)

    @torch.no_grad()
    def _take(self, present: list[int]) -> None:
        """Copy the weights of the lowest rank present, as many as it has: garbage may live longer on one rank than on another."""
        source, owned = min(present), self._loop.once_owned()
        once = {id(p): number for number, p in sorted(owned.items(), reverse=True) if p.layout == torch.strided}
        kinds = {number: kind_of(owned[number]) for number in sorted(once.values())}
        sent, rates = self._group.share(FOLLOWED, (kinds, self._rates()), [source])[source]
        if self._group.world.rank != source:
            self._take_rates(rates)
        copy_from(self._group, owned, sent, source)

    def _own(self, number: Number, like: Described, owned: dict[Number, torch.Tensor]) -> torch.Tensor:
        p = owned.get(number)
        return p if p is not None and kind_of(p) == like.kind else like.stand_in(self._group.device)


def _differ(rates: dict[int, Rates], number: int, group: int) -> bool:
    """Whether ranks that have this group of that optimizer have different learning rates for it."""
    return len({view[number][group] for view in rates.values() if len(view.get(number, ())) > group}) > 1
