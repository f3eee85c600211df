"""The call sites of backward in the user's script, and how the ranks agree on the parameters that one reaches.

A parameter that a site never reaches is in no set of that site, so its ``grad`` stays ``None`` as in a single process. ``averagers.py``
builds and shares the averagers of agreed sets.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from parwrap.coordination.call_site import location, trail
from parwrap.coordination.status_board import SyncPoint
from parwrap.coordination.sync_points import BACKWARD, FIRST_BACKWARD
from parwrap.group.group import Group
from parwrap.intercept.backward import Backward
from parwrap.loop.autograd_graph import reached, reenters, sparsely_used
from parwrap.loop.loop_state import Loop
from parwrap.strategies.common.agreement import SiteReport, described, refuse_different_parameters
from parwrap.strategies.ddp.averagers import AveragerRegistry
from parwrap.strategies.ddp.gradient_averager import GradientAverager

__all__ = ["SETTLING", "CallSite", "CallSites"]

SETTLING = 2
"""Visits at which the ranks agree again. The second separates a hand-made parameter, which is reached again, from an input."""

MOST_SITES = 64
"""Limit of call sites, so that a script with a new one for every step does not fill the memory with buckets."""


@dataclass
class CallSite:
    """The state of one place in the script that calls backward.

    Attributes:
        visits: the number of visits since the ranks last agreed from the start.
        generation: the loop's generation when the ranks agreed.
        averager: the averager of the parameters that it reaches; ``None`` if it trains nothing.
        trail: the lines of code that lead there, which identify it on other ranks.
        sync_point: the sync point of its next backward.
        bare: the leaf tensors among those parameters that are not an ``nn.Parameter``, by id.
        frozen: parameters of optimizers that were frozen then.
        nested_on_any_rank: whether backward passes run inside it, on any rank.
        nested_here: whether this rank has run some inside it, which its graph may not show.
        remakes: whether its parameters are leaf tensors that the script makes again for each step.
    """

    visits: int = 0
    generation: int = -1
    averager: GradientAverager | None = None
    trail: tuple[str, ...] = ()
    sync_point: SyncPoint | None = None
    bare: dict[int, torch.Tensor] = field(default_factory=dict)
    frozen: tuple[torch.Tensor, ...] = ()
    nested_on_any_rank: bool = False
    nested_here: bool = False
    remakes: bool = False

    def restart(self) -> None:
        """Make the ranks agree from the start at its next visit."""
        self.averager, self.visits = None, 0


class CallSites(dict[tuple, CallSite]):
    """The call sites by the key of :func:`call_site`.

    Args:
        group: the ranks.
        loop: the loop state, which numbers the parameters.
        averagers: the averagers in use.
    """

    def __init__(self, group: Group, loop: Loop, averagers: AveragerRegistry) -> None:
        super().__init__()
        self._group, self._loop, self._averagers = group, loop, averagers

    def of(self, averager: GradientAverager) -> list[CallSite]:
        """The sites that use ``averager``."""
        return [site for site in self.values() if site.averager is averager]

    def drop(self, averager: GradientAverager) -> None:
        """Drop ``averager``, on all ranks: they agree again at its sites."""
        for site in self.of(averager):
            site.restart()
        self._averagers.drop(averager.number)

    def add(self, key: tuple) -> CallSite:
        """Add a site; the oldest makes room for it."""
        if len(self) >= MOST_SITES:
            del self[next(iter(self))]
        return self.setdefault(key, CallSite())

    def agree(self, site: CallSite, call: Backward) -> None:
        """Agree with the other ranks on the parameters that ``call`` reaches at ``site``."""
        afresh = site.visits == 0 or site.generation != self._loop.generation
        known = () if afresh or site.averager is None else site.averager.parameters
        # not by live objects: an optimizer in a garbage cycle may be alive on some ranks only
        owned = {number: p for number, p in sorted(self._loop.once_owned().items()) if p.requires_grad}
        number_of = {id(p): number for number, p in owned.items()}
        leaves = {id(leaf): leaf for leaf in (*reached(call.roots), *call.existing_grads)}
        sparse = sparsely_used(call.roots) | {id(p) for p in call.existing_grads if p.grad is not None and p.grad.is_sparse}

        inputs = self._inputs(leaves.values())

        def is_parameter(leaf: torch.Tensor) -> bool:
            return id(leaf) in number_of or (isinstance(leaf, nn.Parameter) and id(leaf) not in inputs)

        mine = {id(p): p for p in (*known, *reversed(leaves.values())) if is_parameter(p) and p.requires_grad}
        numbered = [p for key, p in mine.items() if key in number_of]
        others = [p for key, p in mine.items() if key not in number_of]
        bare = [
            leaf
            for leaf in reversed(leaves.values())
            if not (is_parameter(leaf) or id(leaf) in inputs) and (afresh or id(leaf) in site.bare)
        ]
        remade = not (afresh or mine or bare) and bool(site.bare)
        if remade:
            bare = list(reversed(leaves.values()))
        place, site.trail = location(), trail()
        report = SiteReport(
            place,
            site.trail,
            owned=dict(zip((number_of[id(p)] for p in numbered), described(numbered), strict=True)),
            others=described(others),
            bare=described(bare),
            sparse=frozenset(number_of[key] for key in sparse if key in number_of),
            reenters=site.nested_on_any_rank or site.nested_here or reenters(call.roots),
            generation=self._loop.generation,
            owns=bool(owned),
            visits=0 if afresh else site.visits,
            buffers=afresh or (site.averager is not None and site.averager.buffers.moves()),
        )
        self._group.synchronize(FIRST_BACKWARD)
        reports, used = self._gathered_reports(report, site)
        refuse_different_parameters(reports)
        site.averager, site.bare = self._averagers.agree(reports, used, owned, others, bare)
        site.generation = self._loop.generation
        site.visits = 0 if afresh else site.visits
        site.nested_on_any_rank = any(each.reenters for each in reports.values())
        site.remakes = remade and bool(site.bare)
        site.sync_point = SyncPoint(BACKWARD, place, site.averager.number) if site.averager else None
        site.frozen = tuple(p for p in self._loop.owned().values() if not p.requires_grad)

    def _inputs(self, leaves: Iterable[torch.Tensor]) -> set[int]:
        """The ids of ``leaves`` that each rank makes for its part of a batch, such as latents or an attack on the input.

        They may be the same on all ranks at first, as zeros are. Those of an optimizer of one batch count, and beside another optimizer
        those with a row for each sample.
        """
        inputs = self._loop.tensors_of_one_batch()
        if self._loop.passes_in_for and any(True for _ in self._loop.optimizers()):
            bare = (leaf for leaf in leaves if not isinstance(leaf, nn.Parameter))
            inputs |= {id(leaf) for leaf in bare if self._loop.has_row_for_each_sample(leaf)}
        return inputs

    @torch.inference_mode(False)
    def answer_agreement(self, detail: int, present: list[int]) -> None:
        """Answer ranks that agree on a site, after this rank has left: it only learns their averager."""
        reports, used = self._gathered_reports(None)
        theirs = next(iter(reports.values()))
        averager, _ = self._averagers.agree(reports, used, *self._averagers.stand_ins(theirs))
        for site in self.values():
            # this rank has been there too, and need not ask again when it returns
            if averager and site.sync_point and site.trail == theirs.trail and site.generation == theirs.generation:
                site.averager, site.visits = averager, theirs.visits + 1
                site.sync_point = SyncPoint(BACKWARD, theirs.location, averager.number)

    def _gathered_reports(self, mine: SiteReport | None, here: CallSite | None = None) -> tuple[dict[int, SiteReport], set[int]]:
        """The reports of the ranks in a backward, and the numbers of the averagers that any rank uses elsewhere than ``here``."""
        used = {site.averager.number for site in self.values() if site.averager and site is not here}
        gathered = self._group.share(FIRST_BACKWARD, (mine, used), range(self._group.world.size))
        reports = {rank: report for rank, (report, _) in gathered.items() if report is not None}
        return reports, set().union(*(used for _, used in gathered.values()))
