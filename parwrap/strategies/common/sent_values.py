"""Sends the tensors of one rank to all: one collective for each dtype.

``parameter_broadcast.py`` copies parameters one by one instead, which needs no second copy of a model in memory.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from parwrap.group.collectives import CPU
from parwrap.group.group import Group

__all__ = ["SENT", "Kind", "copy_from", "fingerprint", "kind_of", "send"]

SENT = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool)
"""Dtypes that collectives support."""

Kind = tuple[tuple[int, ...], torch.dtype]
"""The shape and the dtype of a tensor."""

Name = TypeVar("Name")


def kind_of(tensor: torch.Tensor) -> Kind:
    return tuple(tensor.shape), tensor.dtype


def fingerprint(tensor: torch.Tensor) -> int:
    """A fingerprint: equal for equal values, and almost surely different for others."""
    values: Any = tensor.detach().reshape(-1).view(torch.uint8).cpu().numpy()
    return zlib.crc32(values)


def send(group: Group, tensors: Mapping[Name, torch.Tensor], kinds: Mapping[Name, Kind], source: int) -> dict[Name, torch.Tensor]:
    """The values of rank ``source``'s ``tensors``, on all ranks.

    Args:
        group: the ranks.
        tensors: this rank's tensors by name; only ``source`` must have them.
        kinds: the shapes and dtypes of what ``source`` sends, in the same order on all ranks.
        source: the rank that sends.
    """
    received: dict[Name, torch.Tensor] = {}
    home = group.device if group.backend == "nccl" else CPU
    for dtype in dict.fromkeys(dtype for _, dtype in kinds.values()):
        sizes = {name: torch.Size(shape).numel() for name, (shape, each) in kinds.items() if each == dtype}
        if group.world.rank == source:
            flat = torch.cat([tensors[name].reshape(-1).to(home) for name in sizes])
        else:
            flat = torch.empty(sum(sizes.values()), dtype=dtype, device=home)
        dist.broadcast(flat, source)
        for name, values in zip(sizes, flat.split(list(sizes.values())), strict=True):
            here = tensors.get(name)
            received[name] = values.view(kinds[name][0]).to(group.device if here is None else here.device)
    return received


def copy_from(group: Group, tensors: Mapping[Name, torch.Tensor], kinds: Mapping[Name, Kind], source: int) -> None:
    """Copy rank ``source``'s values to those of ``tensors`` that have the same shape and dtype; called on all ranks, as :func:`send`."""
    for name, values in send(group, tensors, kinds, source).items():
        here = tensors.get(name)
        if here is not None and kind_of(here) == kinds[name] and group.world.rank != source:
            here.data.copy_(values)  # .data: no change by the script, and graphs may have saved the tensor
