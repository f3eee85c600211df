"""How ranks that share the batch of a layer exchange its statistics.

On the CPUs of one node, they use shared memory; elsewhere, they use a separate process group. They have nested sync points, because this
happens within forward and backward passes, which have sync points of their own. A rank that took a different path answers with zeros, which
do not count.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from parwrap.coordination import status_board
from parwrap.coordination.call_site import worth_a_look
from parwrap.coordination.subgroup_sync import NestedCoordinator
from parwrap.coordination.sync_points import Coordinator
from parwrap.errors import UsageError
from parwrap.group.collectives import CPU
from parwrap.group.device import uses_nccl
from parwrap.group.group import Group
from parwrap.intercept.norm import Norm
from parwrap.strategies.common.state_transfer import outermost_modules
from parwrap.system.shared_memory import shared_memory
from parwrap.system.shared_vectors import CAPACITY, SharedVectors
from parwrap.torch_private.modules import registered_buffers, registered_parameters

__all__ = ["SUM", "StatisticsExchange", "new_group", "own_group", "shared_among"]

FIRST_USE = "the first use of a batch norm"
ADVICE = "Run the same layers in the same order on all ranks, or remove @parwrap.sync_bn."
SEARCHES = 8
"""For this many new layers, all objects are searched each time; then ever more rarely, because layers may be new in each step."""

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
GATHER, SUM = 0, 1


class StatisticsExchange:
    """The exchange between ranks that share their batches.

    Args:
        process_group: torch's group of those ranks; ``None`` if they use shared memory.
        group: parwrap's group, if it has started one; its sync points detect ranks in different layers.
        first_uses: the sync points of all ranks of that ``group``.
    """

    def __init__(self, process_group: Any = None, group: Group | None = None, first_uses: _FirstUses | None = None) -> None:
        self._process_group, self._group, self._first_uses = process_group, group, first_uses
        self._on_gpu = process_group is not None and uses_nccl(process_group)
        self._nameless = _Layer(self, "a batch norm")
        self._layers: dict[int, tuple[weakref.ref[torch.Tensor], _Layer]] = {}
        self._search, self._part = first_uses is not None, -1
        self.nested: NestedCoordinator | None = None
        self.board: SharedVectors | None = None

    def layer(self, call: Norm) -> _Layer:
        """The layer of ``call``, which identifies it on all ranks."""
        tensor = call.weight if call.running_mean is None else call.running_mean
        if tensor is None:
            return self._nameless
        if self.nested and self.nested.part != self._part:
            self._layers, self._search, self._part = {}, True, self.nested.part
        known = self._layers.get(id(tensor))
        if known is None or known[0]() is not tensor:
            known = self._find(tensor) if self._search else None
        return known[1] if known else self._nameless

    def together(self, how: int, what: str, numbers: torch.Tensor) -> torch.Tensor:
        """The combined ``numbers`` of all ranks.

        Args:
            how: ``GATHER`` or ``SUM``.
            what: the name in errors.
            numbers: a vector of the same length and dtype on all ranks.
        """
        sent = numbers.to(self._home(numbers))
        if self.board is not None:
            if len(sent) > CAPACITY:
                raise UsageError(
                    f"{what} sends {len(sent)} numbers, but parwrap.sync_bn supports layers with at most {CAPACITY // 2 - 1} channels."
                )
            sent = sent.double()
        if self.nested is None:
            return self._send(how, sent).to(numbers)
        self.nested.enter(what, len(sent) << 3 | DTYPES.index(sent.dtype) << 1 | how, self._group.coordinator.number)  # type: ignore[union-attr]
        result = self._send(how, sent) if self.board is None else self._put(how, sent)
        self.nested.through()
        return result.to(numbers)

    def answer(self, sent: int) -> None:
        """Take part with zeros in what the others do."""
        nothing = torch.zeros(sent >> 3, dtype=DTYPES[sent >> 1 & 3], device=self._home())
        if self.board is None:
            self._send(sent & 1, nothing)
        else:
            self.board.put(self.nested.number, nothing)  # type: ignore[union-attr]

    def _home(self, numbers: torch.Tensor | None = None) -> torch.device:
        """The device that numbers must be on to be sent."""
        if not self._on_gpu:
            return CPU
        if numbers is not None and numbers.is_cuda:
            return numbers.device
        return self._group.device if self._group else torch.device("cuda")

    def _send(self, how: int, numbers: torch.Tensor) -> torch.Tensor:
        if how == SUM:
            total = numbers.clone()
            dist.all_reduce(total, group=self._process_group)
            return total
        rows = numbers.new_empty(dist.get_world_size(self._process_group), len(numbers))
        dist.all_gather(list(rows), numbers, group=self._process_group)
        return rows

    def _put(self, how: int, numbers: torch.Tensor) -> torch.Tensor:
        board, nested, group = self.board, self.nested, self._group
        assert board is not None and nested is not None and group is not None  # noqa: PT018
        deadline = time.monotonic() + group.timeout.total_seconds()

        def waiting() -> None:
            nested.compare()
            group.coordinator.raise_if_failed()
            if time.monotonic() > deadline:
                raise group.coordinator.in_vain("the statistics of a batch norm", None)

        board.put(nested.number, numbers)
        rows = board.all(nested.number, len(numbers), waiting)
        return rows.sum(0) if how == SUM else rows

    def _find(self, tensor: torch.Tensor) -> tuple[weakref.ref[torch.Tensor], _Layer] | None:
        """The layer of a new ``tensor``, once all ranks have reached a new layer; ``None`` if it belongs to no module."""
        times = self._first_uses.synchronize()  # type: ignore[union-attr]
        if times > SEARCHES and not worth_a_look(times):
            self._layers[id(tensor)] = weakref.ref(tensor), self._nameless
        else:
            named = _named_layers()
            self._layers = {key: (weakref.ref(each), _Layer(self, f"batch norm {path!r}")) for key, (each, path) in named.items()}
            self._search = id(tensor) in self._layers  # if one is not found, the next will not be found either
        return self._layers.get(id(tensor))


class _FirstUses:
    """The sync points at which all ranks have reached layers that are new to them.

    All ranks count them in the same way, including ranks that only answer, so that all search at the same sync point.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator, self._part, self._times = coordinator, -1, 0
        coordinator.answer(FIRST_USE, lambda detail, present: self._count(), lasting=True)

    def synchronize(self) -> int:
        """Wait for all ranks. Returns the number of this sync point in the present part of the run."""
        self._coordinator.wait(FIRST_USE)
        self._count()
        return self._times

    def _count(self) -> None:
        if self._part != self._coordinator.part:
            self._part, self._times = self._coordinator.part, 0
        self._times += 1


def _named_layers() -> dict[int, tuple[torch.Tensor, str]]:
    """A tensor of each layer of all modules, by its id, and the path of the layer in the outermost module."""
    names: dict[int, tuple[torch.Tensor, str]] = {}
    for root in outermost_modules():
        for path, module in root.named_modules():
            if "running_mean" in registered_buffers(module):
                for tensor in (registered_buffers(module)["running_mean"], registered_parameters(module).get("weight")):
                    if tensor is not None:
                        names[id(tensor)] = tensor, min(path, names.get(id(tensor), (None, path))[1])
    return names


class _Layer:
    """One layer's exchange."""

    def __init__(self, sharing: StatisticsExchange, name: str) -> None:
        self._sharing, self._name = sharing, name

    def gathered(self, numbers: torch.Tensor) -> torch.Tensor:
        what = f"the forward pass of {self._name} ({numbers.numel() // 2} channels)"
        return self._sharing.together(GATHER, what, numbers)

    def summed(self, numbers: torch.Tensor) -> torch.Tensor:
        return self._sharing.together(SUM, f"the backward pass of {self._name} ({numbers.numel() // 2} channels)", numbers)


def shared_among(group: Group, ranks: Sequence[int]) -> StatisticsExchange | None:
    """The exchange of ``ranks`` of ``group``, or ``None`` for one rank. It is created once, when all ranks of the group have reached it."""
    first_uses = group.once(FIRST_USE, lambda: nullcontext(_FirstUses(group.coordinator)))
    return group.once(("sync_bn", ranks), lambda: _opened(group, ranks, first_uses))


_own_groups: weakref.WeakKeyDictionary[Any, dict[Sequence[int], Any]] = weakref.WeakKeyDictionary()
"""The exchange for ranks of a process group that the user's own code has started. It ends with that group."""


def own_group(ranks: Sequence[int]) -> Any:
    """A separate process group of ``ranks``, next to the one that the user's own code has started. It is created once."""
    made = _own_groups.setdefault(dist.group.WORLD, {})
    if ranks not in made:
        made[ranks] = new_group(ranks)
    return made[ranks]


def new_group(ranks: Sequence[int], **options: Any) -> Any:
    """A separate process group of ``ranks``, created without the other ranks."""
    return dist.new_group(list(ranks), use_local_synchronization=True, **options)


@contextmanager
def _opened(group: Group, ranks: Sequence[int], first_uses: _FirstUses) -> Iterator[StatisticsExchange | None]:
    group.synchronize("parwrap.sync_bn")
    if len(ranks) == 1:
        yield None
        return
    place, store = ranks.index(group.world.rank), dist.PrefixStore(f"sync_bn/{ranks}", group.store)
    on_one_node = group.world.on_one_node
    world = replace(group.world, rank=place, size=len(ranks), local_rank=place, local_size=len(ranks) if on_one_node else 0)
    with status_board.opened(world, store) as entries:
        if on_one_node and group.backend != "nccl":
            sharing = StatisticsExchange(group=group, first_uses=first_uses)
            board_store = dist.PrefixStore("blackboard", store)
            memory = shared_memory(board_store, world.rank, range(world.size), SharedVectors.size(world.size))
            sharing.board = SharedVectors(memory, world.size, place)
        else:
            sharing = StatisticsExchange(new_group(ranks, backend=group.backend, timeout=group.timeout), group, first_uses)
        sharing.nested = NestedCoordinator(entries, ranks, sharing.answer, ADVICE, group.coordinator.keep_pace)
        group.coordinator.add_nested(sharing.nested)
        yield sharing
