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

from parwrap.collectives import reduce_mean
from parwrap.errors import RankMismatchError
from parwrap.group import Group, is_alone
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


@dataclass(frozen=True)
class _View:
    """What one rank tells the others about a backward.

    Attributes:
        location: file and line that called it.
        owned: shape and checksum of the parameters that it reaches and an optimizer owns, by ``Loop.owned``'s number.
        others: shape and checksum of those that no optimizer owns.
        bare: shape and checksum of leaf tensors that are no ``nn.Parameter``: inputs, or parameters of a hand-written SGD.
    """

    location: str
    owned: dict[tuple[int, int], tuple[tuple[int, ...], int]]
    others: list[tuple[tuple[int, ...], int]]
    bare: list[tuple[tuple[int, ...], int]]


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
        self._armed: frozenset[int] = frozenset()
        self._watched: list[torch.utils.hooks.RemovableHandle] = []
        self._running = False

    def backward(self, call: Backward) -> None:
        """Run ``call`` and average what it leaves in the gradients."""
        if self._running or is_alone():
            call.run()
            return
        self._running, self._armed = True, frozenset()
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
        elif call.options.get("create_graph"):
            # a gradient with a graph of its own cannot go through a bucket
            self._armed = site.averager.ids
            call.run()
            self._average_now([p for p in site.averager.parameters if p.grad is not None])
        else:
            self._run(site, site.averager, call)
        if self._strays:
            self._average_strays(site)

    def _run(self, site: _Site, averager: Averager, call: Backward) -> None:
        fits, self._armed = False, averager.ids
        try:
            fits = averager.run(call)
        finally:
            if not fits:
                # other parameters than before, or a backward that failed half way: start afresh
                self._averagers.pop(_key(averager.parameters), None)
                site.averager, site.visits = None, 0
        if not fits:
            others = [
                leaf for leaf in reversed(reached(call.beginnings)) if isinstance(leaf, nn.Parameter) and id(leaf) not in averager.ids
            ]
            self._strays = {key: p for key, p in self._strays.items() if not any(p is other for other in others)}
            self._average_now([p for p in others if p.grad is not None])

    def _average_now(self, parameters: list[torch.Tensor]) -> None:
        """Average the gradients of ``parameters`` after a backward, in place."""
        grads = [p.grad for p in parameters]
        for grad, average in zip(grads, reduce_mean(grads), strict=True):
            grad.data.copy_(average)  # type: ignore[union-attr]

    def _new_site(self, key: tuple) -> _Site:
        if len(self._sites) >= MOST_SITES:
            del self._sites[next(iter(self._sites))]
        return self._sites.setdefault(key, _Site())

    def _settle(self, site: _Site, call: Backward) -> None:
        """Agree with the other ranks on the parameters that ``site`` reaches."""
        afresh = site.visits == 0 or site.generation != self._loop.generation
        known = () if afresh or site.averager is None else site.averager.parameters
        everything = self._loop.owned()
        owned = {number: p for number, p in everything.items() if p.requires_grad}
        number_of = {id(p): number for number, p in owned.items()}
        leaves = {id(leaf): leaf for leaf in reached(call.beginnings)}

        def is_parameter(leaf: torch.Tensor) -> bool:
            return isinstance(leaf, nn.Parameter) or id(leaf) in number_of

        mine = {id(p): p for p in (*known, *reversed(leaves.values())) if is_parameter(p) and p.requires_grad}
        others = [p for key, p in mine.items() if key not in number_of]
        bare = [leaf for leaf in reversed(leaves.values()) if not is_parameter(leaf) and (afresh or id(leaf) in site.bare)]
        view = _View(
            location(),
            owned={number_of[key]: _described(p) for key, p in mine.items() if key in number_of},
            others=[_described(p) for p in others],
            bare=[_described(leaf) for leaf in bare],
        )
        views = self._group.exchange("backward", view)
        _refuse_different_parameters(views)

        union = sorted({number for each in views for number in each.owned})
        agreed = [owned[number] for number in union] + others
        checksums = [{each.owned[number][1] for each in views if number in each.owned} for number in union]
        checksums += [{checksum for _, checksum in each} for each in zip(*(each.others for each in views), strict=True)]
        self._take_same_values([p for p, each in zip(agreed, checksums, strict=True) if len(each) > 1], len(agreed))
        alike = _made_alike(bare, views)

        site.generation = self._loop.generation
        site.visits = 0 if afresh else site.visits
        site.bare = {id(leaf): leaf for leaf in alike}
        varies = any(len(each.owned) < len(union) for each in views)
        site.averager = self._averager([*agreed, *alike], varies) if agreed or alike else None
        site.frozen = tuple(p for p in everything.values() if not p.requires_grad)
        self._watch(owned.values())

    def _take_same_values(self, different: list[torch.Tensor], total: int) -> None:
        """Take rank 0's values of parameters that the ranks have built ``different``."""
        if not different:
            return
        warnings.warn(
            f"parwrap: {len(different)} of {total} parameters had different values on different ranks when training began; "
            "rank 0's are taken. Seed before the model is built, or build it inside the decorated function.",
            stacklevel=2,
        )
        for p in different:
            values = p.detach().contiguous()
            dist.broadcast(values, 0)
            p.data.copy_(values)  # .data: the graph of the running step has saved these tensors, and must not find them changed

    def _averager(self, parameters: list[torch.Tensor], varies: bool) -> Averager:
        key = _key(parameters)
        averager = self._averagers.get(key)
        if averager is None or varies:
            averager = self._averagers[key] = Averager(parameters, varies, **self._options())
        return averager

    def _watch(self, owned: Iterable[torch.Tensor]) -> None:
        """Notice gradients of parameters that a site was not known to reach: it takes another way now, or a checkpoint hides them."""
        for handle in self._watched:
            handle.remove()
        sets = [site.averager.ids for site in self._sites.values() if site.averager]
        in_all = frozenset.intersection(*sets) if sets else frozenset()
        self._watched = [p.register_post_accumulate_grad_hook(self._stray) for p in owned if id(p) not in in_all]

    def _stray(self, parameter: torch.Tensor) -> None:
        if self._running and id(parameter) not in self._armed:
            self._strays[id(parameter)] = parameter

    def _average_strays(self, site: _Site) -> None:
        """Average what this backward left in parameters outside of its set, and take them into the set."""
        owned = self._loop.owned()
        mine = [number for number, p in owned.items() if id(p) in self._strays]
        numbers = {number for each in self._group.exchange("gradient outside the known set", mine) for number in each}
        strays = [owned[number] for number in sorted(numbers)]
        for p in strays:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        self._average_now(strays)
        self._strays.clear()
        known = () if site.averager is None else site.averager.parameters
        site.averager = self._averager([*known, *strays], varies=False)
        self._watch(p for p in owned.values() if p.requires_grad)


def _made_alike(bare: list[torch.Tensor], views: list[_View]) -> list[torch.Tensor]:
    """Those of the ``bare`` leaf tensors that are the same on all ranks: made alike, hence parameters; inputs differ."""
    if any(len(view.bare) != len(bare) for view in views):
        return []
    return [leaf for leaf, *each in zip(bare, *(view.bare for view in views), strict=True) if len(set(each)) == 1]


def _refuse_different_parameters(views: list[_View]) -> None:
    """Parameters that no optimizer owns are told apart by their order in the graph, which must be the same on all ranks."""
    shapes: dict[tuple[int, int], set] = {}
    for view in views:
        for number, (shape, _) in view.owned.items():
            shapes.setdefault(number, set()).add(shape)
    if any(len(each) > 1 for each in shapes.values()) or len({tuple(shape for shape, _ in view.others) for view in views}) > 1:
        where = "; ".join(f"rank {rank} at {view.location} reaches {len(view.owned) + len(view.others)}" for rank, view in enumerate(views))
        raise RankMismatchError(
            f"the ranks are in backwards of different parameters: {where}. Give the parameters to an optimizer before the first "
            "backward, so that the ranks can tell which is which, or let all ranks take the same way."
        )


def _key(parameters: Iterable[torch.Tensor]) -> tuple[int, ...]:
    return tuple(id(p) for p in parameters)


def _described(tensor: torch.Tensor) -> tuple[tuple[int, ...], int]:
    return tuple(tensor.shape), _checksum(tensor)


def _checksum(tensor: torch.Tensor) -> int:
    """The sum of the bit patterns: the same for the same values, and different for two random initialisations."""
    octets = tensor.detach().reshape(-1).view(torch.uint8)
    if octets.numel() % 8 or octets.storage_offset() % 8:
        return int(octets.sum())
    return int(octets.view(torch.int64).sum())  # whole words need no copy, which a sum of narrower integers makes
