"""``gather_with_grad``: the batch of all ranks, for losses that compare the samples of a batch with each other.

The forward pass is a sync point of all ranks; a rank that has left the loop takes part with no rows. The backward pass runs while the ranks
average gradients, so it has a separate process group and nested sync points, like shared batch norms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from parwrap.api import distributed
from parwrap.batch_norm.statistics_exchange import SUM, StatisticsExchange, new_group, own_group
from parwrap.coordination import status_board
from parwrap.coordination.subgroup_sync import NestedCoordinator
from parwrap.errors import UsageError
from parwrap.group.collectives import callers, differing_structures, home, refuse_difference
from parwrap.group.group import Group
from parwrap.system.structures import Structure
from parwrap.torch_private.autograd import NO_GRAPH_TASK, current_graph_task_id

__all__ = ["gather_with_grad"]

NAME = "gather_with_grad"
KIND = f"parwrap.{NAME}"
ADVICE = "Call parwrap.gather_with_grad() and backward() in the same order on all ranks."
ALIKE = "Only the first dimension may differ between ranks."
ROWS, ROW_BYTES = "the number of rows", "the bytes of a row"


def gather_with_grad(x: torch.Tensor) -> torch.Tensor:
    """Gather the rows of every rank's ``x``, in the order of ranks, on every rank. Gradients flow back to the rank that a row came from.

    Use it for losses over pairs of samples, such as those of CLIP and SupCon. On every rank, compute the loss of the whole batch from the
    gathered rows; ``backward`` then leaves the gradient that a single process with the whole batch would compute. See
    docs/batch_losses.rst.

    Args:
        x: a tensor with at least one dimension. Only the number of rows may differ between ranks.

    Returns:
        A tensor with the rows of all ranks along dimension 0, on the device of ``x``. ``x`` itself on one rank, outside of a
        distributed function, in an evaluation (where every rank reads whole batches), and if ranks step separately
        (``strategy="none"``, ``"hogwild"``).

    Raises:
        UsageError: ``x`` is not a tensor with rows, or the call is in a checkpoint that the backward recomputes.
        RankMismatchError: dtypes or shapes of rows differ; on every rank, with the difference.

    >>> gather_with_grad(torch.tensor([[1.0], [2.0]]))
    tensor([[1.],
            [2.]])
    """
    if not isinstance(x, torch.Tensor):
        raise UsageError(f"parwrap.gather_with_grad() takes a tensor, not {type(x).__name__}: call it once for each tensor.")
    if x.dim() == 0 or x.layout != torch.strided or (x.is_complex() and x.requires_grad):
        what = f"one of shape {list(x.shape)}, {x.dtype}, {x.layout}"
        raise UsageError(
            "parwrap.gather_with_grad() takes a dense tensor with one row per sample, and with a real dtype if it requires a gradient, "
            f"not {what}."
        )
    return cast(torch.Tensor, _from_all_ranks(x))


@torch.compiler.disable
def _from_all_ranks(x: torch.Tensor) -> torch.Tensor:
    group = callers(NAME)
    if group is None or distributed.steps_apart():
        return x
    parts = distributed.parts()
    if parts is not None and parts.loop.evaluations:
        return x
    if current_graph_task_id() != NO_GRAPH_TASK:
        raise UsageError(
            "parwrap.gather_with_grad() runs in a checkpoint that is recomputed in the backward pass, where the ranks cannot "
            "synchronize: call it outside of the checkpointed part."
        )
    if parts is not None and parts.loop.weights.upcoming([x.detach()]).weight == 0:
        x = x[:0]  # this rank has no batch left and repeats one
    return _row_gatherer(group).gather(x)


class _RowGatherer:
    """Gathers rows over the ranks of ``group``.

    Args:
        group: the process group.
        sharing: sums the gradients of all ranks.
    """

    def __init__(self, group: Group, sharing: StatisticsExchange) -> None:
        self._group, self._sharing = group, sharing

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of every rank's ``x``, in the order of ranks."""
        requires_grad = x.requires_grad and torch.is_grad_enabled()
        structure = {
            ROWS: str(len(x)),
            ROW_BYTES: str(math.prod(x.shape[1:]) * x.element_size()),
            "each row": f"{list(x.shape[1:])} {str(x.dtype).removeprefix('torch.')}",
            "requires_grad": str(requires_grad),
        }
        structures = differing_structures(NAME, structure, self._group)
        compared = {rank: {key: what for key, what in each.items() if key not in (ROWS, ROW_BYTES)} for rank, each in structures.items()}
        refuse_difference(NAME, compared, ALIKE)
        rows = self._rows(structures) if structures else [len(x)] * self._group.world.size
        return _Gathered.apply(x, self, rows) if requires_grad else self.send(x, rows)

    def answer(self, detail: int, present: list[int]) -> None:
        """Take part, without rows, when the ranks ``present`` gather theirs."""
        structures: dict[int, Structure] = self._group.share("structure", None, present)
        self._send_bytes(torch.empty(0, dtype=torch.uint8), self._rows(structures), int(structures[present[0]][ROW_BYTES]))

    def send(self, x: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Gather the rows of all ranks; ``rows`` has the number of each."""
        sent = x.detach().contiguous().reshape(-1).view(torch.uint8)  # not every backend supports every dtype
        gathered = self._send_bytes(sent, rows, math.prod(x.shape[1:]) * x.element_size())
        return gathered.to(x.device).view(x.dtype).view(sum(rows), *x.shape[1:])

    def send_back(self, gradient: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """The ``gradient`` of this rank's rows, from the losses of all ranks."""
        exact = gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient
        total = self._sharing.together(SUM, f"the backward pass of {KIND} ({len(gradient)} rows)", exact.reshape(-1))
        first = sum(rows[: self._group.world.rank])
        return total.view_as(gradient)[first : first + rows[self._group.world.rank]].to(gradient.dtype)

    def _rows(self, structures: dict[int, Structure]) -> list[int]:
        return [int(structures[rank][ROWS]) if rank in structures else 0 for rank in range(self._group.world.size)]

    def _send_bytes(self, sent: torch.Tensor, rows: Sequence[int], row_bytes: int) -> torch.Tensor:
        """The bytes of all ranks, with parts padded to the longest."""
        longest = max(rows) * row_bytes
        part = torch.zeros(longest, dtype=torch.uint8, device=home(self._group))
        part[: len(sent)] = sent
        gathered = part.new_empty(len(rows), longest)
        if longest:
            dist.all_gather(list(gathered), part)
        if len({*rows}) == 1:
            return gathered.view(-1)
        return torch.cat([each[: count * row_bytes] for each, count in zip(gathered, rows, strict=True)])


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gatherer: _RowGatherer, rows: Sequence[int]) -> torch.Tensor:
        ctx.gatherer, ctx.rows = gatherer, rows
        return gatherer.send(x, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.gatherer.send_back(gradient, ctx.rows), None, None


def _row_gatherer(group: Group) -> _RowGatherer:
    """The separate group of ``group``'s ranks, created when all ranks have reached it."""
    if group.coordinator is None:
        return _RowGatherer(group, StatisticsExchange(own_group(tuple(range(group.world.size)))))
    return cast(_RowGatherer, group.once(NAME, lambda: _opened(group)))


@contextmanager
def _opened(group: Group) -> Iterator[_RowGatherer]:
    group.synchronize(f"the first {KIND}")
    ranks = range(group.world.size)
    with status_board.opened(group.world, dist.PrefixStore(NAME, group.store)) as entries:
        sharing = StatisticsExchange(new_group(ranks, backend=group.backend, timeout=group.timeout), group)
        sharing.nested = NestedCoordinator(entries, ranks, sharing.answer, ADVICE, group.coordinator.keep_pace)
        group.coordinator.add_nested(sharing.nested)
        gatherer = _RowGatherer(group, sharing)
        group.coordinator.answer(KIND, gatherer.answer, lasting=True)
        yield gatherer
