"""Detects gradients of parameters outside of the set that a backward averages, and averages them after it.

A call site may reach other parameters than before, and a checkpoint hides what it reaches. Hooks notice parameters of optimizers; others
only show in the graph. ``recovery.py`` decides when the ranks do this together.
"""

from __future__ import annotations

from typing import Any

import torch

from parwrap.coordination.status_board import SyncPoint
from parwrap.coordination.sync_points import BACKWARD
from parwrap.errors import RankMismatchError
from parwrap.group.collectives import all_reduced
from parwrap.group.group import Group
from parwrap.intercept.backward import Backward
from parwrap.loop.autograd_graph import reached
from parwrap.loop.loop_state import Loop
from parwrap.strategies.common.agreement import described
from parwrap.strategies.ddp.averagers import AveragerRegistry
from parwrap.strategies.ddp.call_sites import CallSites
from parwrap.strategies.ddp.gradient_averager import GradientAverager
from parwrap.strategies.ddp.unaveraged import Unaveraged

__all__ = ["UnexpectedGradients"]

DIVERGED = "missed or unexpected parameters"
UNEXPECTED = "gradients outside of the known set"


class UnexpectedGradients:
    """The gradients that came outside of the averager's set.

    Args:
        group: the ranks.
        loop: the loop state, which numbers the parameters.
        sites: the call sites of backward.
        averagers: the averagers in use.
        unaveraged: records which gradients are averages.

    Attributes:
        armed: the averager of the running backward, if any.
    """

    def __init__(self, group: Group, loop: Loop, sites: CallSites, averagers: AveragerRegistry, unaveraged: Unaveraged) -> None:
        self._group, self._loop, self._sites, self._averagers, self._unaveraged = group, loop, sites, averagers, unaveraged
        self.armed: GradientAverager | None = None
        self._found: dict[int, torch.Tensor] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def watch(self) -> None:
        """Hook the parameters of optimizers that are not in the set of every site."""
        self.unwatch()
        sets = [site.averager.ids for site in self._sites.values() if site.averager]
        in_all = frozenset.intersection(*sets) if sets else frozenset()
        trained = (p for p in self._loop.once_owned().values() if p.requires_grad)
        self._hooks = [p.register_post_accumulate_grad_hook(self._note) for p in trained if id(p) not in in_all]
        for site in self._sites.values():
            if site.averager:
                site.averager.at_once = bool(self._hooks) or site.averager.buffers_move

    def unwatch(self) -> None:
        """Remove the hooks."""
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()

    def look(self, call: Backward, averager: GradientAverager, closely: bool) -> None:
        """Notice what is visible before ``call`` runs: gradients that it adds to, and if ``closely``, what its graph reaches."""
        for p in call.existing_grads:
            self._note(p)
        if closely and averager.others(reached(call.roots)):
            self._group.coordinator.diverge()  # it has all of the set, and more that has no hook

    def forget(self) -> None:
        """Forget the gradients of a backward pass that failed."""
        self._found.clear()

    def compare(self, averager: GradientAverager, weight: float, others: list[torch.Tensor]) -> bool:
        """Find parameters that a rank missed, or that belong to no known optimizer, and average their gradients.

        Args:
            averager: the averager of the backward.
            weight: the weight of this rank.
            others: the parameters outside of the set that this rank's loss reaches.

        Returns:
            Whether the parameter set is stale.
        """
        others = [p for p in others if id(p) not in self._found]
        mine = (averager.missed, averager.is_stale, [(tuple(p.shape), p.dtype) for p in others])
        gathered = self._group.share(DIVERGED, mine, range(self._group.world.size)).values()
        averager.drop(frozenset.intersection(*(missed for missed, _, _ in gathered)))
        kinds: list[Any] = next((each for _, _, each in gathered if each), [])
        if any(each and each != kinds for _, _, each in gathered):
            raise RankMismatchError(
                f"the ranks reached different new parameters in the same backward pass, of shapes {[each for _, _, each in gathered]}. "
                "Pass them to an optimizer, so that the ranks can match them."
            )
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in others]
        grads = grads or [torch.zeros(shape, dtype=dtype) for shape, dtype in kinds]
        for p, average in zip(others, self._averages(grads, weight), strict=False):
            p.grad = average.to(p)
        self._unaveraged.note(others)
        return bool(kinds) or any(is_stale for _, is_stale, _ in gathered)

    def average(self, averager: GradientAverager, weight: float) -> None:
        """Average the gradients of this backward outside of its set, and add the parameters to the set.

        Args:
            averager: the averager of the backward.
            weight: the weight of this rank.
        """
        owned = self._loop.once_owned()
        own = {number: p for number, p in owned.items() if id(p) in self._found}
        have_sparse = [p.grad is not None and p.grad.is_sparse for p in own.values()]
        mine = dict(zip(own, zip(described(own.values()), have_sparse, strict=True), strict=True))
        gathered = self._group.share(UNEXPECTED, mine, range(self._group.world.size))
        numbered = sorted({number: each for view in gathered.values() for number, each in view.items()}.items())
        trained = {number: p for number, p in owned.items() if p.requires_grad}  # DDP skips those that are frozen on this rank
        unexpected = [self._averagers.own(number, each, trained) for number, (each, _) in numbered]
        sparse = averager.sparse.union(id(p) for p, (_, (_, is_sparse)) in zip(unexpected, numbered, strict=True) if is_sparse)
        grads = [torch.zeros_like(p) if p.grad is None or not weight else p.grad.to_dense() for p in unexpected]
        for p, average in zip(unexpected, self._averages(grads, weight), strict=True):
            p.grad = average.to(p).to_sparse(1) if id(p) in sparse else average.to(p)
        self._found.clear()
        self._unaveraged.note(unexpected)
        extended = self._averagers.build([*averager.parameters, *unexpected], sparse, varies=True)
        for site in self._sites.of(averager):
            if site.sync_point:
                site.averager, site.sync_point = extended, SyncPoint(BACKWARD, site.sync_point.place, extended.number)
        self.watch()

    def _averages(self, grads: list[torch.Tensor], weight: float) -> list[torch.Tensor]:
        """The averages over the ranks of ``grads``, which are multiplied by this rank's ``weight``."""
        *sums, weights = all_reduced([*grads, torch.tensor(weight, dtype=torch.float64)], self._group)
        return [total / weights.item() for total in sums]

    def _note(self, parameter: torch.Tensor) -> None:
        if self.armed is not None and id(parameter) not in self.armed.ids:
            self._found[id(parameter)] = parameter
            self.armed.note_unexpected()
