"""What the ranks tell each other about the parameters of a backward, before gradients are averaged: describing and comparing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from parwrap.errors import RankMismatchError

__all__ = ["View", "alike", "described", "differing", "refuse_different_parameters"]

Described = tuple[tuple[int, ...], int]
"""The shape of a tensor and a checksum of its values."""


@dataclass(frozen=True)
class View:
    """What one rank tells the others about a backward.

    Attributes:
        location: file and line that called it.
        owned: the parameters that it reaches and an optimizer owns, by ``Loop.owned``'s number.
        others: those that no optimizer owns.
        bare: leaf tensors that are no ``nn.Parameter``: inputs, or parameters of a hand-written SGD.
        sparse: the numbers of the owned ones that get sparse gradients.
        reenters: whether backwards are called inside of it, as re-entrant checkpointing does.
        averagers: the numbers of the averagers that are in use.
    """

    location: str
    owned: Mapping[tuple[int, int], Described]
    others: Sequence[Described]
    bare: Sequence[Described]
    sparse: frozenset[tuple[int, int]]
    reenters: bool
    averagers: frozenset[int]


def described(tensor: torch.Tensor) -> Described:
    """What is told of ``tensor``.

    >>> described(torch.zeros(2, 3))
    ((2, 3), 0)
    """
    return tuple(tensor.shape), _checksum(tensor)


def differing(views: Collection[View], owned: Sequence[tuple[int, int]]) -> list[int]:
    """The places of the parameters whose values differ between ranks, in ``owned`` followed by the others."""
    checksums = [{view.owned[number][1] for view in views if number in view.owned} for number in owned]
    checksums += [{checksum for _, checksum in each} for each in zip(*(view.others for view in views), strict=True)]
    return [place for place, each in enumerate(checksums) if len(each) > 1]


def alike(bare: Sequence[torch.Tensor], views: Collection[View]) -> list[torch.Tensor]:
    """Those of the ``bare`` leaf tensors that are the same on all ranks: made alike, hence parameters; inputs differ."""
    if any(len(view.bare) != len(bare) for view in views):
        return []
    return [leaf for leaf, *each in zip(bare, *(view.bare for view in views), strict=True) if len(set(each)) == 1]


def refuse_different_parameters(views: Mapping[int, View]) -> None:
    """Parameters that no optimizer owns are told apart by their order in the graph, which must be the same on all ranks."""
    shapes: dict[tuple[int, int], set] = {}
    for view in views.values():
        for number, (shape, _) in view.owned.items():
            shapes.setdefault(number, set()).add(shape)
    if any(len(each) > 1 for each in shapes.values()) or len({tuple(shape for shape, _ in view.others) for view in views.values()}) > 1:
        where = "; ".join(
            f"rank {rank} at {view.location} reaches {len(view.owned) + len(view.others)}" for rank, view in sorted(views.items())
        )
        raise RankMismatchError(
            f"the ranks are in backwards of different parameters: {where}. Give the parameters to an optimizer before the first "
            "backward, so that the ranks can tell which is which, or let all ranks take the same way."
        )


def _checksum(tensor: torch.Tensor) -> int:
    """The sum of the bit patterns: the same for the same values, and different for two random initialisations."""
    octets = tensor.detach().reshape(-1).view(torch.uint8)
    if octets.numel() % 8 or octets.storage_offset() % 8:
        return int(octets.sum())
    return int(octets.view(torch.int64).sum())  # whole words need no copy, which a sum of narrower integers makes
