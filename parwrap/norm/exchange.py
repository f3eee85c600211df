"""How ranks that share the batch of a layer exchange its statistics: one collective in each forward, and one in each backward.

On CPUs these messages never use the process group that averages gradients. On GPUs they do, as those of torch's ``SyncBatchNorm``: a second
communicator of NCCL costs memory, and kernels of two may wait for each other. Each message has a header: its number and the number of its
layer. Ranks at the same step send equal headers; if headers differ, ranks raise instead of mixing two layers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

from parwrap.errors import LockstepError
from parwrap.intercept.intercepted_calls import Norm
from parwrap.places import script_place
from parwrap.rank_zero.path_rules import passing
from parwrap.ranks.device import uses_nccl
from parwrap.ranks.group import current
from parwrap.ranks.shared_vectors import Messages, keeps_order_of_writes
from parwrap.torch_private.distributed import quiet_gloo

__all__ = ["Alone", "Exchange", "Statistics", "statistics_of"]

LIMIT = 2**12
"""Numbers in headers are below this, so that float32 holds their sums over thousands of ranks exactly."""

CPU = torch.device("cpu")


class Exchange(Protocol):
    """How the ranks that share a batch combine the numbers of one layer."""

    def gathered(self, numbers: torch.Tensor) -> tuple[torch.Tensor, float]:
        """The vectors of all ranks as rows, and the sum of their last entries: the number of values per channel in the whole batch."""

    def summed(self, numbers: torch.Tensor) -> torch.Tensor:
        """The sum of the vectors of all ranks."""


class Alone:
    """The exchange of a rank that has the whole batch."""

    def gathered(self, numbers: torch.Tensor) -> tuple[torch.Tensor, float]:
        return numbers.view(1, -1), numbers[-1].item()

    def summed(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers


class Statistics(Messages):
    """The exchange between the ranks of a process group.

    Args:
        process_group: torch's group of these ranks.
        control_message: makes a context manager that checks lockstep on the node before the message in it is sent.
        folder: a folder that all ranks share, if they are on one node and on the CPU: short vectors then travel through shared memory.
            ``None`` otherwise.

    Attributes:
        nameless: the exchange for layers without weights and running statistics, and for sums outside of layers.
    """

    def __init__(
        self,
        process_group: Any,
        control_message: Callable[[str], AbstractContextManager[Any]] = nullcontext,
        folder: Path | None = None,
    ) -> None:
        super().__init__(process_group, control_message, folder, passing)
        self.on_gpu = uses_nccl(process_group)
        self._messages = 0
        self._layers: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._seen = 0
        self.nameless = _Layer(self, 0)
        self._unchecked: list[tuple[torch.Tensor, list[int]]] = []

    def layer(self, call: Norm) -> _Layer:
        """The exchange of the layer of ``call``. Layers are numbered at their first use."""
        tensor = call.weight if call.running_mean is None else call.running_mean
        if tensor is None:
            return self.nameless
        if tensor not in self._layers:
            self._seen += 1
            self._layers[tensor] = _Layer(self, self._seen)
        return self._layers[tensor]

    def header(self, layer: int) -> list[int]:
        """The header of the next message, for the layer with this number."""
        self._messages += 1
        return [self._messages % LIMIT, layer % LIMIT]

    def read(self, numbers: torch.Tensor) -> list[float]:
        """``numbers`` on the host, with one wait for the device. Also check the headers that :meth:`check_later` has put off.

        Raises:
            LockstepError: headers differ.
        """
        unchecked, self._unchecked = self._unchecked, []
        read = torch.cat([numbers, *(totals for totals, _ in unchecked)]).tolist() if unchecked else numbers.tolist()
        for at, (_, header) in enumerate(unchecked):
            self.check(read[len(numbers) + 2 * at :][:2], header)
        return read[: len(numbers)]

    def check(self, totals: list[float], header: list[int]) -> None:
        """Raise if ``totals``, the sums of the headers of all ranks, are not this rank's ``header`` times the number of ranks.

        Raises:
            LockstepError: the headers differ.
        """
        if totals != [number * self.size for number in header]:
            raise LockstepError(
                f"the ranks are in different batch norms: this rank is in batch norm {header[1]} at {script_place()}. Run the same layers "
                "in the same order on all ranks, or remove @parwrap.sync_bn."
            )

    def check_later(self, totals: torch.Tensor, header: list[int]) -> None:
        """Let the next forward do :meth:`check`, because it waits for the device anyway."""
        self._unchecked.append((totals, header))

    def check_now(self) -> None:
        """Do the checks that :meth:`check_later` has put off."""
        if self._unchecked:
            self.read(torch.zeros(0, device=self._unchecked[0][0].device))


class _Layer:
    """The exchange of one layer.

    Args:
        statistics: the exchange of all layers.
        number: the number of the layer.

    Attributes:
        silent: the exchange of this layer for a batch of which this rank has no part.
    """

    def __init__(self, statistics: Statistics, number: int) -> None:
        self._statistics, self._number = statistics, number
        self.silent = Silent(self)

    def gathered(self, numbers: torch.Tensor) -> tuple[torch.Tensor, float]:
        together = self._statistics
        sent, header = self._headed(numbers)
        rows = together.gather(f"batch norm {self._number} of {len(numbers) // 2} channels", sent)
        count, *totals = together.read(rows[:, -3:].sum(0))
        together.check(totals, header)
        return rows[:, :-2].to(numbers.device), count

    def summed(self, numbers: torch.Tensor) -> torch.Tensor:
        together = self._statistics
        sent, header = self._headed(numbers)
        kind = f"the gradient of batch norm {self._number}" if self._number else "the gradient of all ranks' rows"
        total = together.sum(kind, sent)
        if together.on_gpu:
            together.check_later(total[-2:], header)
        else:
            together.check(total[-2:].tolist(), header)
        return total[:-2].to(numbers)

    def _headed(self, numbers: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        """Return ``numbers`` on a device from which they can be sent, with the header at their end; and the header."""
        header = self._statistics.header(self._number)
        home = CPU if not self._statistics.on_gpu else numbers.device if numbers.is_cuda else torch.device("cuda")
        numbers = numbers.detach().to(home)
        sent = torch.tensor(header, dtype=numbers.dtype, pin_memory=home.type == "cuda").to(home, non_blocking=True)
        return torch.cat([numbers, sent]), header


class Silent:
    """The exchange of a rank that has no part of the batch: its forward repeats a sample, whose numbers it sends as zeros."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def gathered(self, numbers: torch.Tensor) -> tuple[torch.Tensor, float]:
        return self._exchange.gathered(torch.zeros_like(numbers))

    def summed(self, numbers: torch.Tensor) -> torch.Tensor:
        self._exchange.summed(torch.zeros_like(numbers))
        return torch.zeros_like(numbers)


_groups: weakref.WeakKeyDictionary[Any, dict[Sequence[int], Any]] = weakref.WeakKeyDictionary()
"""The process groups that this file has made, by the group of all ranks. They are dropped together with that group."""


def statistics_of(ranks: Sequence[int], process_group: Any = None) -> Statistics:
    """The exchange between ``ranks``, which include this rank.

    Args:
        ranks: the numbers of the ranks.
        process_group: the group of these ranks, if the script has made one; ``None`` to use one of parwrap.
    """
    group = current()
    of_all = group is not None and len(ranks) == group.world.size
    if group is None or (process_group is not None and not of_all):  # ranks outside of the group send nothing, so positions would differ
        return Statistics(process_group or _group_of(ranks))
    on_cpu = group.backend != "nccl"
    own = process_group or ((group.control if on_cpu else dist.group.WORLD) if of_all else None)
    together = own or _group_of(ranks, timeout=group.timeout, backend=group.backend)
    by_memory = group.world.on_one_node and on_cpu and keeps_order_of_writes()
    # a lambda, because the control message belongs to the scope that is open when it is sent
    return Statistics(together, lambda kind: group.control_message(kind), group.folder if by_memory else None)


def _group_of(ranks: Sequence[int], **options: Any) -> Any:
    """A process group of ``ranks``, made at the first call by these ranks alone."""
    made = _groups.setdefault(dist.group.WORLD, {})
    if ranks not in made:
        with quiet_gloo():
            made[ranks] = dist.new_group(list(ranks), use_local_synchronization=True, **options)
    return made[ranks]
