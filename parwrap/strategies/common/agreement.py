"""Describing the parameters of a backward to the other ranks and comparing them, before gradients are averaged."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from parwrap.errors import RankMismatchError

__all__ = ["Described", "View", "alike", "checksums", "described", "differing", "is_stand_in", "refuse_different_parameters"]

MARK = "_parwrap_stand_in"


class Described(NamedTuple):
    """What other ranks get to know of a tensor: its shape and dtype, a checksum of its values, and the type of its device."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    checksum: int
    device: str

    @property
    def kind(self) -> tuple[tuple[int, ...], torch.dtype]:
        return self.shape, self.dtype

    def stand_in(self, device: torch.device) -> torch.Tensor:
        """A tensor for a rank that trains on ``device``, does not have this one, and takes part in what others do with it."""
        # where the others have theirs: that decides which backend carries its gradient
        place = device if device.type == self.device else torch.device(self.device)
        tensor = torch.zeros(self.shape, dtype=self.dtype, device=place, requires_grad=True)
        setattr(tensor, MARK, True)
        return tensor


def is_stand_in(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is in the place of one that this rank does not have, so that its values say nothing."""
    return hasattr(tensor, MARK)


@dataclass(frozen=True)
class View:
    """What one rank reports to the others about a backward.

    Attributes:
        location: file and line that called it.
        trail: the lines that lead there.
        owned: the parameters that it reaches and an optimizer owns, by ``Loop.owned``'s number.
        others: those that no optimizer owns.
        bare: leaf tensors that are no ``nn.Parameter``: inputs, or parameters of a hand-written SGD.
        sparse: the numbers of the owned ones that get sparse gradients.
        reenters: whether backwards are called inside it, as re-entrant checkpointing does.
        generation: of the loop.
        owns: whether there is an optimizer at all.
        visits: how often this site was visited before.
        buffers: whether buffers of the models around the parameters are known to change in training.
    """

    location: str
    trail: tuple[str, ...]
    owned: Mapping[tuple[int, int], Described]
    others: Sequence[Described]
    bare: Sequence[Described]
    sparse: frozenset[tuple[int, int]]
    reenters: bool
    generation: int
    owns: bool
    visits: int
    buffers: bool = False


def checksums(tensors: Iterable[torch.Tensor]) -> list[int]:
    """The sum of the bit patterns of each tensor: the same for the same values, and different for two random initialisations.

    The host waits for a device once, however many tensors are there.

    >>> checksums([torch.zeros(2, 3), torch.tensor([1, 2])])
    [0, 3]
    """
    sums = [_sum_of_bits(tensor) for tensor in tensors]
    places: dict[torch.device, list[int]] = {}
    for place, each in enumerate(sums):
        places.setdefault(each.device, []).append(place)
    found: dict[int, int] = {}
    for on_device in places.values():
        found.update(zip(on_device, torch.stack([sums[place] for place in on_device]).tolist(), strict=True))
    return [found[place] for place in range(len(sums))]


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout != torch.strided:
        return torch.zeros((), dtype=torch.int64)
    octets = tensor.detach().reshape(-1).view(torch.uint8)
    if octets.numel() % 8 or octets.storage_offset() % 8:
        return octets.sum(dtype=torch.int64)
    return octets.view(torch.int64).sum()  # whole words need no copy, which a sum of narrower integers makes


def described(tensors: Iterable[torch.Tensor]) -> list[Described]:
    """What other ranks get to know of each tensor.

    >>> described([torch.zeros(2, 3)])
    [Described(shape=(2, 3), dtype=torch.float32, checksum=0, device='cpu')]
    """
    tensors = list(tensors)
    return [
        Described(tuple(tensor.shape), tensor.dtype, value, tensor.device.type)
        for tensor, value in zip(tensors, checksums(tensors), strict=True)
    ]


def differing(views: Collection[View], owned: Sequence[tuple[int, int]]) -> list[int]:
    """The places of the parameters whose values differ between ranks, in ``owned`` followed by the others."""
    checksums = [{view.owned[number].checksum for view in views if number in view.owned} for number in owned]
    checksums += [{other.checksum for other in each} for each in zip(*(view.others for view in views), strict=True)]
    return [place for place, each in enumerate(checksums) if len(each) > 1]


def alike(views: Collection[View]) -> list[int]:
    """The places of the bare leaf tensors that are the same on all ranks: made alike, hence parameters; inputs differ."""
    if len({len(view.bare) for view in views}) > 1:
        return []
    return [place for place, each in enumerate(zip(*(view.bare for view in views), strict=True)) if len(set(each)) == 1]


def refuse_different_parameters(views: Mapping[int, View]) -> None:
    """Raise an error unless all ranks reach the same parameters; those that no optimizer owns go by their order in the graph."""
    kinds: dict[tuple[int, int], set] = {}
    for view in views.values():
        for number, each in view.owned.items():
            kinds.setdefault(number, set()).add(each.kind)
    if any(len(each) > 1 for each in kinds.values()) or len({tuple(each.kind for each in view.others) for view in views.values()}) > 1:
        where = "; ".join(
            f"rank {rank} at {view.location} reaches {len(view.owned)} of optimizers and {len(view.others)} of none"
            for rank, view in sorted(views.items())
        )
        raise RankMismatchError(
            f"the ranks are in backwards of different parameters: {where}. Give the parameters to an optimizer before the first "
            "backward, so that the ranks can tell which is which, or let all ranks take the same way."
        )
