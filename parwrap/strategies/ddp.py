"""Data parallelism: every rank holds the model, and each backward leaves the average gradient in ``.grad``.

The actor on the backward verb. It finds out which parameters a backward call site reaches, lets the ranks agree on them once
and hands the backward to the ``Averager`` of that set; exactly one is armed at a time. A parameter that a site never
reaches is in no set of that site, so its ``grad`` stays ``None`` as in a single process.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parwrap.errors import RankMismatchError
from parwrap.group import Group, is_alone, reduce_mean
from parwrap.loop import Loop
from parwrap.strategies.averager import Averager
from parwrap.strategies.graph import call_site, location, reached
from parwrap.verbs.backward import Backward

__all__ = ["DDP"]

SETTLING = 2
"""Visits at which a site is looked at closely. The second tells a hand-made parameter, which is reached again, from an input."""

MOST_SITES = 64
"""A script that makes a new call site for every step must not fill the memory with buckets."""


@dataclass
class _Site:
    """What is known of one place in the script that calls backward."""

    visits: int = 0
    generation: int = -1
    averager: Averager | None = None
    bare: dict[int, torch.Tensor] = field(default_factory=dict)
    frozen: tuple[torch.Tensor, ...] = ()


class DDP:
    """Averages gradients over the ranks of ``group``.

    Args:
        group: the process group.
        loop: what the training loop has done so far.
        options: gives what ``DistributedDataParallel`` shall get, such as ``bucket_cap_mb``.
    """

    def __init__(self, group: Group, loop: Loop, options: Callable[[], dict[str, Any]]) -> None:
        self._group, self._loop, self._options = group, loop, options
        self._sites: dict[tuple, _Site] = {}
        self._averagers: weakref.WeakValueDictionary[tuple[int, ...], Averager] = weakref.WeakValueDictionary()
        self._strays: dict[int, torch.Tensor] = {}
        self._watched: list[torch.utils.hooks.RemovableHandle] = []
        self._running = False

    def backward(self, call: Backward) -> None:
        """Run ``call`` and average what it leaves in the gradients."""
        if self._running or is_alone():
            call.run()
            return
        self._running = True
        try:
            self._average(call)
        finally:
            self._running = False
        self._loop.ran_backward()

    def close(self) -> None:
        """Let go of the user's parameters: every hook on them is removed."""
        for handle in self._watched:
            handle.remove()
        self._sites.clear()
        self._watched.clear()

    def _average(self, call: Backward) -> None:
        key = call_site()
        site = self._sites.get(key) or self._new_site(key)
        if site.visits < SETTLING or site.generation != self._loop.generation or any(p.requires_grad for p in site.frozen):
            self._settle(site, call)
        site.visits += 1
        if self._loop.weight != 1.0:
            call = call.scaled(self._loop.weight)
        if site.averager is None:
            call.run()
        else:
            self._run(site, site.averager, call)
        if self._strays:
            self._average_strays(site)

    def _run(self, site: _Site, averager: Averager, call: Backward) -> None:
        fits = False
        try:
            fits = averager.run(call)
        finally:
            if not fits:
                # frozen parameters, or a backward that failed half way: start afresh
                self._averagers.pop(_key(averager.parameters), None)
                site.averager, site.visits = None, 0

    def _new_site(self, key: tuple) -> _Site:
        if len(self._sites) >= MOST_SITES:
            del self._sites[next(iter(self._sites))]
        return self._sites.setdefault(key, _Site())

    def _settle(self, site: _Site, call: Backward) -> None:
        """Agree with the other ranks on the parameters that ``site`` reaches."""
        owned = {key: p for key, p in self._loop.owned().items() if p.requires_grad}
        leaves = reached(call.options.get("inputs") or call.tensors)
        parameters = [leaf for leaf in leaves if isinstance(leaf, nn.Parameter) or id(leaf) in owned]
        bare = [leaf for leaf in leaves if not isinstance(leaf, nn.Parameter) and id(leaf) not in owned]
        first = site.generation != self._loop.generation or site.visits == 0
        known = () if site.averager is None else site.averager.parameters
        mine = {id(p) for p in (*known, *parameters)} - (set() if first else set(site.bare))
        ordered = [index for index, key in enumerate(owned) if key in mine]
        free = list({id(p): p for p in (*known, *reversed(parameters)) if id(p) in mine and id(p) not in owned}.values())
        hand_made = [leaf for leaf in reversed(bare) if first or id(leaf) in site.bare]
        unowned = [*free, *hand_made]

        answers = self._group.exchange(
            "backward",
            (location(), ordered, [(tuple(p.shape), _checksum(p)) for p in unowned], len(free), [_checksum(p) for p in owned.values()]),
        )
        where, orders, shapes, counts, checksums = zip(*answers, strict=True)
        if len(set(counts)) > 1 or any(
            len({shape[0] for shape in each}) > 1 for each in zip(*(s[: counts[0]] for s in shapes), strict=True)
        ):
            raise RankMismatchError(
                "the ranks are in backwards of different parameters: "
                + "; ".join(
                    f"rank {rank} at {place} with {len(order) + count}"
                    for rank, (place, order, count) in enumerate(zip(where, orders, counts, strict=True))
                )
                + ". Give the parameters to an optimizer before the first backward, so that ranks can tell them apart."
            )
        union = sorted(set().union(*orders))
        everything = list(owned.values())
        agreed = self._alike(hand_made, [s[counts[0] :] for s in shapes])
        chosen = [everything[index] for index in union] + free + agreed
        self._same_values(
            [everything[i] for i in union] + free,
            [[c[i] for i in union] + [check for _, check in s[:n]] for c, s, n in zip(checksums, shapes, counts, strict=True)],
        )

        site.generation = self._loop.generation
        site.visits = 0 if first else site.visits
        site.bare = {id(leaf): leaf for leaf in agreed}
        site.averager = self._averager(chosen, varies=any(order != union for order in orders)) if chosen else None
        site.frozen = tuple(p for p in self._loop.owned().values() if not p.requires_grad)
        self._watch(p for key, p in owned.items())

    def _alike(self, leaves: list[torch.Tensor], descriptions: list[list]) -> list[torch.Tensor]:
        """Those of the bare ``leaves`` that are the same on all ranks: made alike, hence parameters; inputs differ."""
        if any(len(each) != len(leaves) for each in descriptions):
            return []
        return [leaf for leaf, each in zip(leaves, zip(*descriptions, strict=True), strict=True) if len(set(each)) == 1]

    def _same_values(self, parameters: list[torch.Tensor], checksums: list[list[int]]) -> None:
        """Take rank 0's values where the ranks have built different ones."""
        different = [p for p, each in zip(parameters, zip(*checksums, strict=True), strict=True) if len(set(each)) > 1]
        if not different:
            return
        warnings.warn(
            f"parwrap: {len(different)} of {len(parameters)} parameters had different values on different ranks when training began; "
            "rank 0's are taken. Seed before the model is built, or build it inside the decorated function.",
            stacklevel=2,
        )
        for p in different:
            # .data: the graph of the running step has saved these tensors, and must not find them changed
            dist.broadcast(p.data, 0)

    def _averager(self, parameters: list[torch.Tensor], varies: bool) -> Averager:
        key = _key(parameters)
        averager = self._averagers.get(key)
        if averager is None or varies:
            averager = self._averagers[key] = Averager(parameters, varies, **self._options())
        return averager

    def _watch(self, owned: Iterable[torch.Tensor]) -> None:
        """Notice gradients of parameters that no site is known to reach, as re-entrant checkpoints hide them."""
        for handle in self._watched:
            handle.remove()
        covered = {id(p) for site in self._sites.values() if site.averager for p in site.averager.parameters}
        self._watched = [p.register_post_accumulate_grad_hook(self._stray) for p in owned if id(p) not in covered]

    def _stray(self, parameter: torch.Tensor) -> None:
        self._strays[id(parameter)] = parameter

    def _average_strays(self, site: _Site) -> None:
        """Average what this backward left in parameters outside of its set, and take them into the set."""
        owned = self._loop.owned()
        mine = [index for index, key in enumerate(owned) if key in self._strays]
        everything = list(owned.values())
        strays = [everything[index] for index in sorted(set().union(*self._group.exchange("gradient outside the known set", mine)))]
        averages = reduce_mean([torch.zeros_like(p) if p.grad is None else p.grad for p in strays])
        for p, average in zip(strays, averages, strict=True):
            p.grad = average
        self._strays.clear()
        known = () if site.averager is None else site.averager.parameters
        site.averager = self._averager([*known, *strays], varies=False)
        self._watch(p for p in everything if p.requires_grad)


def _key(parameters: Iterable[torch.Tensor]) -> tuple[int, ...]:
    return tuple(id(p) for p in parameters)


def _checksum(tensor: torch.Tensor) -> int:
    """The sum of the bit patterns: the same for the same values, and different for two random initialisations."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}[tensor.element_size()]
    return int(tensor.detach().contiguous().view(-1).view(integers).sum(dtype=torch.int64))
