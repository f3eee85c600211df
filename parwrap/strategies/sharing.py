"""How ranks that share the batch of a layer send each other its numbers.

They have a process group of their own for it, and a lane of meetings: these collectives come in the midst of forwards and backwards, whose
own must not be mixed up with them. A rank that has parted ways answers with zeros, which count for nothing.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parwrap import mailbox
from parwrap.collectives import CPU
from parwrap.group import Group
from parwrap.lane import Lane
from parwrap.verbs.norm import Norm

__all__ = ["Sharing", "new_group", "shared_among"]

FIRST_USE = "the first use of a batch norm"

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
GATHER, SUM = 0, 1


class Sharing:
    """What ranks that share their batches do together.

    Args:
        process_group: torch's, of those ranks.
        group: parwrap's, if it has started that; its meetings keep ranks apart that are in different layers.
    """

    def __init__(self, process_group: Any, group: Group | None = None) -> None:
        self._process_group, self._group = process_group, group
        self._size = dist.get_world_size(process_group)
        self._on_gpu = dist.get_backend(process_group) == "nccl"
        self._nameless = _Layer(self, "a batch norm")
        self._layers: dict[int, tuple[weakref.ref[torch.Tensor], _Layer]] = {}
        self._found, self._search, self._part = 0, group is not None, -1
        self.lane: Lane | None = None

    def layer(self, call: Norm) -> _Layer:
        """The layer that ``call`` is of, by which ranks know that they are in the same."""
        tensor = call.weight if call.running_mean is None else call.running_mean
        if tensor is None:
            return self._nameless
        if self.lane and self.lane.part != self._part:
            self._layers, self._found, self._part = {}, 0, self.lane.part
        known = self._layers.get(id(tensor))
        if known is None or known[0]() is not tensor:
            if self._search:
                self._find_layers()
            known = self._layers.get(id(tensor))
            if known is None:
                self._search = False  # one that belongs to no module; the next would not be found either
                return self._nameless
        return known[1]

    def together(self, how: int, what: str, numbers: torch.Tensor) -> torch.Tensor:
        """What comes of the ``numbers`` of all ranks.

        Args:
            how: ``GATHER`` or ``SUM``.
            what: for error texts.
            numbers: a vector of the same length and dtype on all ranks.
        """
        sent = numbers
        if self._on_gpu != numbers.is_cuda:
            sent = numbers.to(self._group.device if self._on_gpu and self._group else "cuda" if self._on_gpu else CPU)
        if self.lane is None:
            return self._send(how, sent).to(numbers.device)
        self.lane.enter(what, sent.numel() << 3 | DTYPES.index(sent.dtype) << 1 | how, self._group.meetings.number)  # type: ignore[union-attr]
        result = self._send(how, sent)
        self.lane.through()
        return result.to(numbers.device)

    def answer(self, sent: int) -> None:
        """Take part with zeros in what the others do."""
        device = self._group.device if self._on_gpu and self._group else CPU
        self._send(sent & 1, torch.zeros(sent >> 3, dtype=DTYPES[sent >> 1 & 3], device=device))

    def _send(self, how: int, numbers: torch.Tensor) -> torch.Tensor:
        if how == SUM:
            total = numbers.clone()
            dist.all_reduce(total, group=self._process_group)
            return total
        rows = numbers.new_empty(self._size * numbers.numel())
        dist.all_gather_into_tensor(rows, numbers, group=self._process_group)
        return rows.view(self._size, -1)

    def _find_layers(self) -> None:
        """Number the layers of all modules in the order in which they were built, the same on all ranks."""
        self._group.meet(FIRST_USE)  # type: ignore[union-attr]
        gc.collect()  # which leaves all that is alive in one list, the oldest first
        for module in gc.get_objects():
            if not issubclass(type(module), nn.Module) or "running_mean" not in getattr(module, "_buffers", ()):
                continue
            tensors = [tensor for tensor in (module._buffers["running_mean"], module._parameters.get("weight")) if tensor is not None]
            new = [tensor for tensor in tensors if id(tensor) not in self._layers or self._layers[id(tensor)][0]() is not tensor]
            layer = _Layer(self, f"batch norm {self._found}")
            self._layers |= {id(tensor): (weakref.ref(tensor), layer) for tensor in new}
            self._found += bool(new)


class _Layer:
    """One layer's exchange."""

    def __init__(self, sharing: Sharing, name: str) -> None:
        self._sharing, self._name = sharing, name

    def gathered(self, numbers: torch.Tensor) -> torch.Tensor:
        what = f"the forward of {self._name} ({numbers.numel() // 2} channels)"
        return self._sharing.together(GATHER, what, numbers)

    def summed(self, numbers: torch.Tensor) -> torch.Tensor:
        return self._sharing.together(SUM, f"the backward of {self._name} ({numbers.numel() // 2} channels)", numbers)


def shared_among(group: Group, ranks: Sequence[int]) -> Sharing:
    """How ``ranks`` of ``group`` share; made once, when all ranks of the group have come to it."""
    group.meetings.answer(FIRST_USE, lambda detail, present: None)
    return group.once(("sync_bn", ranks), lambda: _opened(group, ranks))


def new_group(ranks: Sequence[int], **options: Any) -> Any:
    """Another process group of ``ranks``, for which the others need not come."""
    return dist.new_group(list(ranks), use_local_synchronization=True, **options)


@contextmanager
def _opened(group: Group, ranks: Sequence[int]) -> Iterator[Sharing]:
    group.meet("parwrap.sync_bn")
    place = ranks.index(group.world.rank)
    on_one_node = group.world.local_size == group.world.size
    world = replace(group.world, rank=place, size=len(ranks), local_rank=place, local_size=len(ranks) if on_one_node else 0)
    sharing = Sharing(new_group(ranks, backend=group.backend, timeout=group.timeout), group)
    with mailbox.opened(world, dist.PrefixStore(f"sync_bn/{ranks}", group.store)) as entries:
        sharing.lane = Lane(entries, ranks, sharing.answer, runs_ahead=group.device.type == "cuda")
        group.meetings.add_lane(sharing.lane)
        yield sharing
