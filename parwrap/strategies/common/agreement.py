"""Describes the parameters of a backward pass to other ranks, which compare them before gradients are averaged."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from parwrap.errors import RankMismatchError

__all__ = [
    "Described",
    "SiteReport",
    "alike",
    "are_equal",
    "checksums",
    "described",
    "differing",
    "halves",
    "is_stand_in",
    "refuse_different_parameters",
]

MARK = "_parwrap_stand_in"


class Described(NamedTuple):
    """What other ranks learn about a tensor: its shape and dtype, a checksum of its values, and the type of its device."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    checksum: int
    device: str

    @property
    def kind(self) -> tuple[tuple[int, ...], torch.dtype]:
        return self.shape, self.dtype

    def stand_in(self, device: torch.device) -> torch.Tensor:
        """A stand-in for a rank that trains on ``device`` and lacks this tensor, but takes part in the others' calls."""
        # on the others' device type, which decides the backend that carries its gradient
        place = device if device.type == self.device else torch.device(self.device)
        tensor = torch.zeros(self.shape, dtype=self.dtype, device=place, requires_grad=True)
        setattr(tensor, MARK, True)
        return tensor


def is_stand_in(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a stand-in, whose values have no meaning."""
    return hasattr(tensor, MARK)


@dataclass(frozen=True)
class SiteReport:
    """What one rank reports to the others about a backward.

    Attributes:
        location: the file and line that called it.
        trail: the lines of code that lead there.
        owned: the parameters that it reaches and an optimizer owns, by the number of ``Loop.owned``.
        others: those that no optimizer owns.
        bare: leaf tensors that are not an ``nn.Parameter``: inputs, or parameters of a hand-written SGD.
        sparse: the numbers of the owned parameters that get sparse gradients.
        reenters: whether backward passes are called inside it, as re-entrant checkpointing does.
        generation: the loop's generation.
        owns: whether any optimizer exists.
        visits: the number of earlier visits to this site.
        buffers: whether buffers of the models around the parameters change in training.
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
    """The sum of the bit patterns of each tensor: equal for equal values, and different for two random initializations.

    The host waits for a device only once, for any number of tensors.

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


def halves(thing: Any) -> list[int]:
    """Numbers whose sums over ranks show whether all have an equal ``thing``, for :func:`are_equal`.

    They are the halves of a checksum and their squares, whose sums are exact.
    """
    checksum = divmod(zlib.crc32(repr(thing).encode()), 1 << 16)
    return [*checksum, *(half**2 for half in checksum)]


def are_equal(sums: Sequence[float], size: int) -> bool:
    """Whether all of ``size`` ranks have equal things, given the ``sums`` of their :func:`halves`.

    >>> are_equal([2 * each for each in halves("a")], 2), are_equal([one + other for one, other in zip(halves("a"), halves("b"))], 2)
    (True, False)
    """
    return all(int(total) ** 2 == int(squares) * size for total, squares in zip(sums[:2], sums[2:], strict=True))


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout != torch.strided:
        return torch.zeros((), dtype=torch.int64)
    octets = tensor.detach().reshape(-1).view(torch.uint8)
    if octets.numel() % 8 or octets.storage_offset() % 8:
        return octets.sum(dtype=torch.int64)
    return octets.view(torch.int64).sum()  # whole words need no copy, unlike a sum of narrower integers


def described(tensors: Iterable[torch.Tensor]) -> list[Described]:
    """The descriptions of tensors for other ranks.

    >>> described([torch.zeros(2, 3)])
    [Described(shape=(2, 3), dtype=torch.float32, checksum=0, device='cpu')]
    """
    tensors = list(tensors)
    return [
        Described(tuple(tensor.shape), tensor.dtype, value, tensor.device.type)
        for tensor, value in zip(tensors, checksums(tensors), strict=True)
    ]


def differing(reports: Collection[SiteReport], owned: Sequence[tuple[int, int]]) -> list[int]:
    """The positions of the parameters whose values differ between ranks, in ``owned`` followed by the others."""
    checksums = [{report.owned[number].checksum for report in reports if number in report.owned} for number in owned]
    checksums += [{other.checksum for other in each} for each in zip(*(report.others for report in reports), strict=True)]
    return [place for place, each in enumerate(checksums) if len(each) > 1]


def alike(reports: Collection[SiteReport]) -> list[int]:
    """The positions of the bare leaf tensors that are equal on all ranks, so that they must be parameters; inputs differ."""
    if len({len(report.bare) for report in reports}) > 1:
        return []
    return [place for place, each in enumerate(zip(*(report.bare for report in reports), strict=True)) if len(set(each)) == 1]


def refuse_different_parameters(reports: Mapping[int, SiteReport]) -> None:
    """Raise an error unless all ranks reach the same parameters; those that no optimizer owns are compared in graph order."""
    kinds: dict[tuple[int, int], set] = {}
    for report in reports.values():
        for number, each in report.owned.items():
            kinds.setdefault(number, set()).add(each.kind)
    if (
        any(len(each) > 1 for each in kinds.values())
        or len({tuple(each.kind for each in report.others) for report in reports.values()}) > 1
    ):
        where = "; ".join(
            f"rank {rank} at {report.location} reaches {len(report.owned)} parameters of optimizers and {len(report.others)} that no "
            "optimizer has"
            for rank, report in sorted(reports.items())
        )
        raise RankMismatchError(
            f"the ranks run backward passes through different parameters: {where}. Pass the parameters to an optimizer before the first "
            "backward pass, so that the ranks can match them, or let all ranks take the same path."
        )
