"""Decides which rank holds the state of which parameters of an optimizer, and merges, divides and passes on the state.

Parameters are dealt out whole, the largest first, to the rank that has the least, as torch's ``ZeroRedundancyOptimizer`` does. ``zero1.py``
decides when optimizers step.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from parwrap.group.collectives import CPU, arrived, sent
from parwrap.group.group import Group
from parwrap.loop.loop_state import parameters_of

__all__ = ["StatePartition", "dealt_out"]

BUCKET = 2**20
"""The number of elements that are sent at a time."""


def dealt_out(sizes: Sequence[int], loads: list[int]) -> list[int]:
    """Assign each parameter to a rank: the largest first, to the rank that has the least.

    Args:
        sizes: the number of elements of each parameter.
        loads: the number of elements that each rank has already; updated in place.

    >>> dealt_out([3, 5, 4], [0, 0])
    [1, 0, 1]
    """
    ranks = [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        ranks[place] = loads.index(min(loads))
        loads[ranks[place]] += sizes[place]
    return ranks


class StatePartition:
    """The shards of one optimizer.

    Args:
        optimizer: the optimizer whose state is sharded.
        group: the ranks.
    """

    def __init__(self, optimizer: Optimizer, group: Group) -> None:
        self._optimizer, self._group = weakref.ref(optimizer), group
        self._loads = [0] * group.world.size
        self._owners: list[int] = []

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, which must still be alive."""
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    def owners(self) -> list[int]:
        """The rank that holds the state of each parameter, in the order of the groups; new parameters get one here."""
        if new := parameters_of(self.optimizer)[len(self._owners) :]:
            self._owners += dealt_out([p.numel() for p in new], self._loads)
            self._let_go(new)
        return self._owners

    def others(self) -> list[torch.Tensor]:
        """The parameters that this rank does not step."""
        return [p for p, owner in zip(parameters_of(self.optimizer), self.owners(), strict=True) if owner != self._group.world.rank]

    def settle(self, present: Collection[int], hands_on: bool = True) -> None:
        """Agree on the owners, without ranks that are no longer ``present``; called on all ranks.

        Args:
            present: the ranks that take a step or ask for the state.
            hands_on: whether the shards of absent ranks go to the lowest present rank.
        """
        if not self._owners:
            self._find_holders()
        if hands_on:
            self._hand_on(present)

    def _find_holders(self) -> None:
        """Find the owners: state that only some ranks have, for example in a copy of a sharded optimizer, stays where it is."""
        parameters, state = parameters_of(self.optimizer), self.optimizer.state
        mine = [bool(state.get(p)) for p in parameters]
        ranks = range(self._group.world.size)
        gathered = self._group.share("which ranks have state of an optimizer", mine, ranks)
        holders = [[rank for rank in ranks if gathered[rank][place]] for place in range(len(parameters))]
        given = {place: those[0] for place, those in enumerate(holders) if 0 < len(those) < len(ranks)}
        for place, owner in given.items():
            self._loads[owner] += parameters[place].numel()
        rest = [place for place in range(len(parameters)) if place not in given]
        dealt = dealt_out([parameters[place].numel() for place in rest], self._loads)
        given |= dict(zip(rest, dealt, strict=True))
        self._owners = [given[place] for place in range(len(parameters))]
        self._let_go(parameters)

    def _let_go(self, parameters: Iterable[torch.Tensor]) -> None:
        """Drop the state of ``parameters`` that other ranks own."""
        others = {id(p) for p in self.others()}
        for p in parameters:
            if id(p) in others:
                self.optimizer.state.pop(p, None)

    def _hand_on(self, present: Collection[int]) -> None:
        successor = min(present)
        for absent in sorted(set(self.owners()) - set(present)):
            gathered = [sent(self._own()) if self._group.world.rank == absent else None]
            dist.broadcast_object_list(gathered, absent)
            self._owners = [successor if owner == absent else owner for owner in self._owners]
            if self._group.world.rank == successor:
                parameters = parameters_of(self.optimizer)
                for place, state in arrived(gathered[0], self._group.device).items():
                    self.optimizer.state[parameters[place]] = state
            elif self._group.world.rank == absent:
                self._let_go(parameters_of(self.optimizer))

    @torch.no_grad()
    def send(self) -> None:
        """Send the owners' values to every rank; called on all ranks."""
        parameters = parameters_of(self.optimizer)
        for owner in sorted(set(self.owners())):
            for bucket in _buckets(p for p, each in zip(parameters, self._owners, strict=True) if each == owner):
                if len(bucket) == 1 and bucket[0].is_contiguous():
                    dist.broadcast(bucket[0].detach(), owner)
                    continue
                mine = owner == self._group.world.rank
                flat = torch.cat([p.reshape(-1) for p in bucket]) if mine else bucket[0].new_empty(sum(p.numel() for p in bucket))
                dist.broadcast(flat, owner)
                if not mine:
                    for p, values in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                        p.copy_(values.view_as(p))

    def whole(self, state: dict[str, Any]) -> dict[str, Any]:
        """The ``state`` of this rank's optimizer merged with all shards, on the CPU; called on all ranks."""
        return {**state, "state": {**self.without(state)["state"], **arrived(self._gathered(), CPU)}}

    def own(self, state: dict[str, Any]) -> dict[str, Any]:
        """The part of a whole ``state`` that this rank holds."""
        others = {place for place, owner in enumerate(self.owners()) if owner != self._group.world.rank}
        return {**state, "state": {place: each for place, each in state["state"].items() if place not in others}}

    def without(self, state: dict[str, Any]) -> dict[str, Any]:
        """``state`` without the state of any parameter."""
        places = range(len(parameters_of(self.optimizer)))
        return {**state, "state": {key: each for key, each in state["state"].items() if key not in places}}

    def kept(self, state: dict[str, Any]) -> dict[str, Any]:
        """``state`` with this rank's own part as the state of the parameters."""
        return {**state, "state": {**self.without(state)["state"], **self._own()}}

    def join(self) -> None:
        """Give every rank the whole state, if it was sharded; called on all ranks."""
        if self._owners:
            states = {**arrived(self._gathered(), self._group.device), **self._own()}
            for place, p in enumerate(parameters_of(self.optimizer)):
                self.optimizer.state.pop(p, None)
                if place in states:
                    self.optimizer.state[p] = states[place]

    def _gathered(self) -> dict[int, Any]:
        shards: list[Any] = [None] * self._group.world.size
        dist.all_gather_object(shards, sent(self._own()))
        whole = {place: each for shard in shards for place, each in shard.items()}
        return {place: whole[place] for place in sorted(whole)}

    def _own(self) -> dict[int, Any]:
        """This rank's part of the state, by the position of the parameter."""
        state, owned = self.optimizer.state, zip(parameters_of(self.optimizer), self.owners(), strict=True)
        return {place: state[p] for place, (p, owner) in enumerate(owned) if owner == self._group.world.rank and p in state}


def _buckets(parameters: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """``parameters`` in groups of one dtype and device, each of about one bucket; a larger parameter is alone."""
    alike: dict[Any, list[torch.Tensor]] = {}
    for p in parameters:
        if p.numel() >= BUCKET:
            yield [p]
            continue
        bucket = alike.setdefault((p.dtype, p.device), [])
        bucket.append(p)
        if sum(each.numel() for each in bucket) >= BUCKET:
            yield alike.pop((p.dtype, p.device))
    yield from alike.values()
