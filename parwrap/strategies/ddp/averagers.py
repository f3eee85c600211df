"""The averagers in use, numbered alike on all ranks: finds the averager of a set of parameters, or builds it.

Every rank builds the same ones in the same order. A rank that has left the training loop builds them with stand-in tensors, so that it can
take part in the others' backward passes. ``call_sites.py`` decides when to agree on a set.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from parwrap.coordination.call_site import warn
from parwrap.group.group import Group
from parwrap.loop.loop_state import Loop
from parwrap.strategies.common.agreement import Described, SiteReport, alike, checksums, differing, is_stand_in
from parwrap.strategies.common.parameter_broadcast import take_values, warn_of_different
from parwrap.strategies.common.state_transfer import take_state
from parwrap.strategies.common.training_buffers import OuterModules
from parwrap.strategies.ddp.following import Following
from parwrap.strategies.ddp.gradient_averager import GradientAverager
from parwrap.strategies.ddp.unaveraged import Unaveraged

__all__ = ["AveragerRegistry"]


class AveragerRegistry:
    """The averagers of one strategy.

    Args:
        group: the process group.
        loop: what the training loop has done so far.
        options: a function that returns the options of each ``Reducer``, such as ``bucket_cap_mb``.
        unaveraged: records which gradients are already averages over the ranks.
        while_taking: a function that returns a context manager to enter while state is copied from another rank.

    Attributes:
        following: synchronizes weights that a script changes directly.
    """

    def __init__(
        self,
        group: Group,
        loop: Loop,
        options: Callable[[], dict[str, Any]],
        unaveraged: Unaveraged,
        while_taking: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._group, self._loop, self._options = group, loop, options
        self._unaveraged, self._while_taking = unaveraged, while_taking
        self._all: dict[int, GradientAverager] = {}
        self._shared: dict[int, Any] = {}
        self._built = 0
        self._modules = OuterModules(loop)
        self.following = Following(group, loop, self.take_state)

    def get(self, number: int) -> GradientAverager | None:
        """Averager ``number``, or ``None`` if this rank does not have it."""
        return self._all.get(number)

    def ids(self) -> frozenset[int]:
        """The ids of all parameters whose gradients are averaged."""
        return frozenset().union(*(averager.ids for averager in self._all.values()))

    def drop(self, number: int) -> None:
        """Drop averager ``number``."""
        self.keep(self._all.keys() - {number})

    def keep(self, numbers: Collection[int]) -> None:
        """Drop all but ``numbers``."""
        self._all = {number: averager for number, averager in self._all.items() if number in numbers}
        self._shared = {number: which for number, which in self._shared.items() if number in numbers}

    def agree(
        self,
        reports: Mapping[int, SiteReport],
        used: Collection[int],
        owned: Mapping[tuple[int, int], torch.Tensor],
        others: list[torch.Tensor],
        bare: list[torch.Tensor],
    ) -> tuple[GradientAverager | None, dict[int, torch.Tensor]]:
        """The averager of the parameters that any rank reaches, and its leaf tensors that are not an ``nn.Parameter``, alike on all ranks.

        Args:
            reports: the ranks' reports, by rank.
            used: the numbers of the averagers that other sites use too; the others are dropped.
            owned: this rank's parameters of optimizers, by number.
            others: its parameters that no optimizer owns.
            bare: its leaf tensors that are not an ``nn.Parameter``.
        """
        described = {number: each for report in reports.values() for number, each in report.owned.items()}
        union = sorted(described)
        agreed = [*(self.own(number, described[number], owned) for number in union), *others]
        self._take_same_values([agreed[place] for place in differing(reports.values(), union)], len(agreed), min(reports))
        made_alike = [bare[place] for place in alike(reports.values())]
        if not (agreed or made_alike or any(report.owns for report in reports.values())):
            return None, {}
        varies = any(len(report.owned) < len(union) for report in reports.values())
        sparsely = [all(number in report.sparse for report in reports.values() if number in report.owned) for number in union]
        sparse = frozenset(id(p) for p, is_sparse in zip(agreed, sparsely, strict=False) if is_sparse)
        # sites with the same parameters share an averager; a rank with stand-ins must find the same ones
        kinds = tuple((number, described[number].kind) for number in union)
        which = None if others or made_alike or varies else (kinds, tuple(sparsely), next(iter(reports.values())).generation)
        averager = self.build([*agreed, *made_alike], sparse, varies, which)
        averager.buffers_move = any(report.buffers for report in reports.values())
        self.keep({averager.number, *used})
        return averager, {id(leaf): leaf for leaf in made_alike}

    def own(self, number: tuple[int, int], described: Described, owned: Mapping[tuple[int, int], torch.Tensor]) -> torch.Tensor:
        """This rank's parameter of that number, or a stand-in if it has none like it (frozen, or not built)."""
        mine = owned.get(number)
        if mine is None or (tuple(mine.shape), mine.dtype) != described.kind:
            return described.stand_in(self._group.device)
        return mine

    def stand_ins(self, report: SiteReport) -> tuple[Mapping[tuple[int, int], torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """The stand-ins of a rank that has left, for the tensors in another rank's ``report``."""
        others, bare = ([each.stand_in(self._group.device) for each in tensors] for tensors in (report.others, report.bare))
        return {number: p for number, p in self._loop.once_owned().items() if p.requires_grad}, others, bare  # DDP skips frozen ones

    def _take_same_values(self, different: list[torch.Tensor], total: int, source: int) -> None:
        """Copy rank ``source``'s values of the parameters that the ranks have built ``different``."""
        if not different:
            return
        apart = take_values(different, source, self._group)
        if apart and self._loop.trained:
            self.following.drifted()
        elif apart:
            warn_of_different(len(different), total, source, in_loop=bool(self._loop.backwards and self._loop.passes_in_for))
        if apart and self._loop.backwards:
            self.take_state(source)  # they have diverged, and so has the optimizers' state

    def build(self, parameters: list[torch.Tensor], sparse: frozenset[int], varies: bool, which: Any = None) -> GradientAverager:
        """An averager of ``parameters``: the existing one, if it has the same ``which`` and covers everything about them."""
        shared = next((number for number, known in self._shared.items() if known == which), None)
        if shared is not None:
            return self._all[shared]
        self._built += 1
        self._all[self._built] = GradientAverager(
            self._group,
            self._built,
            parameters,
            sparse,
            varies,
            self._modules.around(parameters),
            self._loop.tensors_of_one_batch,
            **self._options(),
        )
        if which is not None:
            self._shared[self._built] = which
        return self._all[self._built]

    def compare_at_end(self) -> None:
        """Copy rank 0's weights to all ranks at the end, if a rank has made separate steps."""
        owned = self._loop.once_owned()
        mine = dict(zip(owned, checksums(owned.values()), strict=True))
        gathered = self._group.share("weights at the end", mine, range(self._group.world.size)).values()
        different = [number for number, value in mine.items() if any(each.get(number, value) != value for each in gathered)]
        # all ranks do this alike, whichever of the parameters they have
        if any(len({each[number] for each in gathered if number in each}) > 1 for number in set().union(*gathered)):
            warn(
                f"parwrap: {len(different)} parameters have different values on different ranks at the end, although their gradients "
                "were averaged: one rank decided on its own to step, or to change weights or a learning rate, for example depending on "
                "random.random() or its part of the loss. Rank 0's values are used. Use parwrap.broadcast(decision) to decide for all "
                "ranks."
                if self._loop.backwards
                else (
                    f"parwrap: {len(different)} parameters have different values on different ranks at the end, and no gradient was "
                    "averaged: they were built differently, or each rank changed them on its own. Rank 0's values are used. Set the seed "
                    "before you build them, and average the changes: parwrap.reduce_mean(change)."
                )
            )
            self.take_state(0)

    def take_state(self, source: int, takes: bool = True) -> None:
        """Copy the state of rank ``source``, if this rank ``takes`` it; called on all ranks."""
        averaged = {(each.number, place): p for each in self._all.values() for place, p in enumerate(each.parameters)}
        with self._while_taking():
            take_state(self._group, self._loop, {where: p for where, p in averaged.items() if not is_stand_in(p)}, source, takes)
        self._unaveraged.begin([*self._loop.once_owned().values(), *averaged.values()])
