"""Parameters in memory that all ranks of a node share: values that one rank writes are seen by the others.

A parameter stays the same object; only its storage is replaced. Ranks identify it by its number in the loop state. The strategy
decides when to share it, and writes the values.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parameter import is_lazy

from parwrap.coordination.call_site import location, warn
from parwrap.errors import RankMismatchError, UsageError
from parwrap.group.group import Group
from parwrap.strategies.common.agreement import Described, described
from parwrap.system.shared_memory import shared_memory

__all__ = ["SharedParameters"]

KIND = "parameters that the ranks share"

ALIGNED = 64
"""Storages begin at multiples of this number of bytes."""

Number = tuple[int, int]


class _Place(NamedTuple):
    """The place of a tensor in the shared memory.

    Attributes:
        begin, size: the place of its storage, in bytes; tensors with a common storage keep it.
        offset, stride: of the tensor in its storage, in elements.
        described: its description.
    """

    begin: int
    size: int
    offset: int
    stride: tuple[int, ...]
    described: Described


class SharedParameters:
    """The shared parameters of the ranks of ``group``."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._shared: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor, int]] = {}
        group.coordinator.answer(KIND, lambda detail, present: None)

    def holds(self, parameters: Collection[torch.Tensor]) -> bool:
        """Whether all ``parameters`` are still in shared memory; an empty one need not be."""
        return all(self._holds(p) for p in parameters)

    def share(self, parameters: Mapping[Number, torch.Tensor]) -> None:
        """Put ``parameters`` into shared memory unless they are there already; they get the values of the lowest present rank.

        Raises:
            UsageError: a parameter cannot be shared.
            RankMismatchError: the ranks have different parameters.
        """
        private = {number: p for number, p in sorted(parameters.items()) if not self._holds(p)}
        for p in private.values():
            _refuse_unshareable(p)
        present = sorted(self._group.synchronize(KIND))
        rank, source = self._group.world.rank, present[0]
        gathered = self._group.share(KIND, (_laid_out(private), set(parameters)), present)
        layout = gathered[source][0]
        for other, (theirs, owned) in gathered.items():
            _refuse_different((source, layout), (other, theirs), gathered[source][1] & owned)
        # some ranks may have garbage-collected an optimizer and its parameters already
        places = {number: place for number, place in layout.items() if number in private}
        if rank == source:
            _warn_of_different(source, [theirs for theirs, _ in gathered.values()])
        if any(layout for layout, _ in gathered.values()):
            self._put(private, places, max([place.begin + place.size for place in layout.values()], default=1), present)

    def _put(self, parameters: Mapping[Number, torch.Tensor], places: Mapping[Number, _Place], size: int, present: list[int]) -> None:
        rank, topic = self._group.world.rank, self._group.key("parameters")
        memory = shared_memory(dist.PrefixStore(topic, self._group.store), rank, present, size)
        storages = {
            place.begin: torch.frombuffer(memory, dtype=torch.uint8, count=place.size, offset=place.begin).untyped_storage()
            for place in places.values()
        }
        if rank == present[0]:
            with torch.no_grad():
                for number, place in places.items():
                    _view(storages[place.begin], place).copy_(parameters[number])
        self._group.share("filled", None, present)  # no rank may read the memory before this
        for number, place in places.items():
            p = parameters[number]
            p.data = shared = _view(storages[place.begin], place)
            self._shared[id(p)] = weakref.ref(p), shared, shared.data_ptr()

    def put_back(self) -> bool:
        """Copy tensors that replaced shared parameters (``p.data = ...``) back into shared memory.

        Return whether all are shared again; a parameter with a new shape or dtype needs another :meth:`share`.
        """
        moved = [(p, shared) for known, shared, at in self._shared.values() if (p := known()) is not None and p.data_ptr() != at]
        if not moved:  # usually true, at every step
            return True
        fitting = [(p, shared) for p, shared in moved if _kind(p) == _kind(shared)]
        with torch.no_grad():
            for p, shared in fitting:
                shared.copy_(p)
                p.data = shared
        return len(fitting) == len(moved)

    def _holds(self, parameter: torch.Tensor) -> bool:
        known = self._shared.get(id(parameter))
        if known is not None and known[0]() is parameter:
            return parameter.data_ptr() == known[2]
        return not is_lazy(parameter) and parameter.numel() == 0

    @torch.no_grad()
    def close(self) -> None:
        """Give every shared parameter private memory with its current values."""
        self.put_back()
        copies: dict[int, torch.UntypedStorage] = {}
        for known, _, at in self._shared.values():
            p = known()
            if p is not None and p.data_ptr() == at:
                storage = p.untyped_storage()
                copy = copies.get(storage.data_ptr()) or copies.setdefault(storage.data_ptr(), storage.clone())
                p.data = torch.empty(0, dtype=p.dtype).set_(copy, p.storage_offset(), p.shape, p.stride())
        self._shared.clear()


def _kind(tensor: torch.Tensor) -> tuple:
    return tensor.shape, tensor.dtype, tensor.device, tensor.layout


def _view(storage: torch.UntypedStorage, place: _Place) -> torch.Tensor:
    tensor = torch.empty(0, dtype=place.described.dtype)
    return tensor.set_(storage, place.offset, place.described.shape, place.stride)


def _laid_out(parameters: Mapping[Number, torch.Tensor]) -> dict[Number, _Place]:
    begins: dict[int, int] = {}
    places, end = {}, 0
    for number, p in parameters.items():
        storage = p.untyped_storage()
        if storage.data_ptr() not in begins:
            begins[storage.data_ptr()] = end
            end += -(-storage.nbytes() // ALIGNED) * ALIGNED
        begin = begins[storage.data_ptr()]
        places[number] = _Place(begin, storage.nbytes(), int(p.storage_offset()), tuple(map(int, p.stride())), described([p])[0])
    return places


def _refuse_unshareable(parameter: torch.Tensor) -> None:
    if is_lazy(parameter):
        problem = "has no shape yet: run the model once before you build the optimizer"
    elif parameter.device.type != "cpu":
        problem = f"is on {parameter.device}, but only CPU memory is shared: keep the model on the CPU, or choose another strategy"
    elif parameter.layout != torch.strided:
        problem = f"has the layout {parameter.layout}: only its gradients may be sparse"
    else:
        return
    raise UsageError(f"the ranks cannot share a parameter of the optimizer used at {location()}, because it {problem}.")


def _refuse_different(source: tuple[int, Mapping[Number, _Place]], other: tuple[int, Mapping[Number, _Place]], owned: set[Number]) -> None:
    """Raise if a parameter that two ranks have differs between them."""
    kinds = {
        rank: {number: place.described.kind for number, place in layout.items() if number in owned} for rank, layout in (source, other)
    }
    mine, theirs = kinds[source[0]], kinds[other[0]]
    if mine != theirs:
        number = min(number for number in owned if mine.get(number) != theirs.get(number))
        has = " and ".join(f"rank {rank} has {_described(each.get(number))}" for rank, each in kinds.items())
        raise RankMismatchError(
            f"the ranks cannot share the parameters that they train at {location()}, because parameter {number[1]} of optimizer "
            f"{number[0]} differs: {has}. Build, cast and move the model in the same way on all ranks before training."
        )


def _described(kind: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    return "one that is shared already" if kind is None else f"one of shape {kind[0]} and {kind[1]}"


def _warn_of_different(source: int, layouts: Collection[Mapping[Number, _Place]]) -> None:
    mine, *others = layouts
    different = [number for number, place in mine.items() if any(each.get(number, place).described != place.described for each in others)]
    if different:
        warn(
            f"parwrap: {len(different)} of {len(mine)} parameters have different values on different ranks; rank {source}'s are used. "
            "Set the seed before you build the model, or build it inside the decorated function."
        )
