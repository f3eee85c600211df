"""How ranks that share the batch of a layer exchange its statistics: one collective in each forward, and one in each backward.

They never travel on the process group that averages gradients, so they never pair with a bucket. Each carries its number: in lockstep all
ranks count alike, so ranks that have come apart raise instead of mixing the numbers of two layers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist

from parwrap.errors import LockstepError
from parwrap.places import script_place
from parwrap.ranks.device import uses_nccl
from parwrap.ranks.group import Group, current
from parwrap.torch_private.autograd import NO_GRAPH_TASK, current_graph_task_id

__all__ = ["Alone", "Exchange", "Silent", "Statistics", "statistics_of"]

NUMBERS = 2**20
"""Numbers of messages are below this, so that float32 holds their sums exactly."""

CPU = torch.device("cpu")


class Exchange(Protocol):
    """How the ranks that share a batch combine the numbers of one layer."""

    def gathered(self, numbers: torch.Tensor) -> tuple[torch.Tensor, float]:
        """The vectors of all ranks, one a row, and the sum of their last entries: how many values a channel of the whole batch has."""

    def summed(self, numbers: torch.Tensor) -> torch.Tensor:
        """The sum of the vectors of all ranks."""


class Alone:
    """The exchange of a rank that has the whole batch."""

    def gathered(self, numbers: torch.Tensor) -> tuple[torch.Tensor, float]:
        return numbers.view(1, -1), numbers[-1].item()

    def summed(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers


class Statistics:
    """The exchange between the ranks of a process group.

    Args:
        process_group: torch's group of these ranks.
        control_message: the context of a message outside of a backward, which checks lockstep on the node before anything is sent.
    """

    def __init__(self, process_group: Any, control_message: Callable[[str], AbstractContextManager[Any]] = nullcontext) -> None:
        self._process_group, self._control_message = process_group, control_message
        self._size = dist.get_world_size(process_group)
        self._on_gpu = uses_nccl(process_group)
        self._number = 0
        self._unchecked: list[tuple[torch.Tensor, int]] = []

    def gathered(self, numbers: torch.Tensor) -> tuple[torch.Tensor, float]:
        sent = self._numbered(numbers)
        rows = sent.new_empty(self._size, len(sent))
        if current_graph_task_id() == NO_GRAPH_TASK:
            with self._control_message(f"batch norm {self._number} of {len(numbers) // 2} channels"):
                dist.all_gather(list(rows), sent, group=self._process_group)
        else:  # a checkpoint computes it again
            dist.all_gather(list(rows), sent, group=self._process_group)
        *counts, number = rows[:, -2:].sum(0).tolist()
        self._check(number, self._number)
        for total, expected in self._unchecked:
            self._check(total.item(), expected)
        self._unchecked.clear()
        return rows[:, :-1].to(numbers.device), counts[0]

    def summed(self, numbers: torch.Tensor) -> torch.Tensor:
        total = self._numbered(numbers)
        dist.all_reduce(total, group=self._process_group)
        if self._on_gpu:  # a backward does not wait for the device
            self._unchecked.append((total[-1], self._number))
        else:
            self._check(total[-1].item(), self._number)
        return total[:-1].to(numbers)

    def _numbered(self, numbers: torch.Tensor) -> torch.Tensor:
        """``numbers`` where they can be sent, followed by the number of this message."""
        self._number = (self._number + 1) % NUMBERS
        home = CPU if not self._on_gpu else numbers.device if numbers.is_cuda else torch.device("cuda")
        return torch.cat([numbers.detach(), numbers.new_full((1,), self._number)]).to(home)

    def _check(self, total: float, number: int) -> None:
        """Raise if the numbers of the messages of all ranks do not add up to that of this rank, times the number of ranks."""
        if total != self._size * number:
            raise LockstepError(
                f"the ranks are in different batch norms: at {script_place()} this rank exchanges statistics {number} times, others not. "
                "Run the same layers in the same order on all ranks, or remove @parwrap.sync_bn."
            )


class Silent:
    """The exchange of a rank whose batch does not count: it has no part of this batch and repeats a sample with weight 0."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def gathered(self, numbers: torch.Tensor) -> tuple[torch.Tensor, float]:
        return self._exchange.gathered(torch.zeros_like(numbers))

    def summed(self, numbers: torch.Tensor) -> torch.Tensor:
        self._exchange.summed(torch.zeros_like(numbers))
        return torch.zeros_like(numbers)


_groups: weakref.WeakKeyDictionary[Any, dict[Sequence[int], Any]] = weakref.WeakKeyDictionary()
"""The process groups made here, by the group of all ranks, with which they end."""


def statistics_of(ranks: Sequence[int], process_group: Any = None) -> Statistics:
    """The exchange of ``ranks``.

    Args:
        ranks: the numbers of the ranks.
        process_group: their group, if the script has made one.
    """
    group = current()
    if group is None:
        return Statistics(process_group or _group_of(ranks))
    if process_group is None:
        on_all_cpus = group.backend != "nccl" and len(ranks) == group.world.size
        process_group = group.control if on_all_cpus else _group_of(ranks, timeout=group.timeout, backend=group.backend)
    return Statistics(process_group, lambda kind: group.control_message(kind))  # of the scope that is open when it is sent


def _group_of(ranks: Sequence[int], **options: Any) -> Any:
    """A process group of ``ranks``, which is made once, without the other ranks."""
    made = _groups.setdefault(dist.group.WORLD, {})
    if ranks not in made:
        made[ranks] = dist.new_group(list(ranks), use_local_synchronization=True, **options)
    return made[ranks]
