"""The collectives that users call: on tensors, numbers and nested dicts, lists and tuples of them.

All of them work, and mean the obvious thing, on one rank without a launcher. Which gradients are averaged when is left to strategies.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from numbers import Number
from typing import Any

import torch
import torch.distributed as dist

from parwrap.errors import UsageError
from parwrap.group import Group, is_alone, is_beside, open_group, world_size
from parwrap.world import detect

__all__ = [
    "all_ranks",
    "all_reduced",
    "any_rank",
    "arrived",
    "barrier",
    "broadcast",
    "callers",
    "gather",
    "group_for",
    "mapped",
    "reduce_mean",
    "reduce_sum",
    "sent",
]

CPU = torch.device("cpu")

MOST_DESCRIBED = 8
"""Tensors of a collective that are compared between ranks before it is begun: shapes that differ would end the process."""


def barrier() -> None:
    """Return when all ranks have called it."""
    if group := group_for("barrier"):
        dist.barrier(device_ids=[group.device.index] if group.backend == "nccl" else None)


def reduce_sum(x: Any) -> Any:
    """The sum of ``x`` over all ranks, on every rank.

    Args:
        x: a tensor (any shape, the same on every rank), a number, or a nested dict, list or tuple of these.

    Returns:
        The same structure with new tensors (detached, on the device and of the dtype they came in; bool counts as
        int64) and plain numbers.

    >>> reduce_sum({"correct": 31, "loss": torch.tensor([1.5])})
    {'correct': 31, 'loss': tensor([1.5000])}
    """
    return _reduce("reduce_sum", x, lambda total, size: total)


def reduce_mean(x: Any) -> Any:
    """The mean of ``x`` over all ranks, on every rank; every rank counts the same.

    Takes and returns what :func:`reduce_sum` does; the mean of integers is a float.

    >>> reduce_mean([2, 0.5])
    [2.0, 0.5]
    """
    return _reduce("reduce_mean", x, lambda total, size: total / size)


def gather(x: Any) -> list[Any]:
    """Every rank's ``x``, as a list in the order of ranks, on every rank.

    Args:
        x: anything that pickles; tensors may differ in shape between ranks and arrive detached, on this rank's device.

    >>> gather("here")
    ['here']
    """
    group = group_for("gather")
    if group is None:
        return [mapped(x, _detached)]
    gathered: list[Any] = [None] * group.world.size
    dist.all_gather_object(gathered, _moved(x, CPU))
    return [_moved(each, group.device) for each in gathered]


def broadcast(x: Any, src: int = 0) -> Any:
    """Rank ``src``'s ``x``, on every rank; what the others pass is not looked at.

    Args:
        x: anything that pickles; tensors arrive detached, on this rank's device.
        src: the rank whose ``x`` is taken.

    >>> broadcast({"lr": 0.1})
    {'lr': 0.1}
    """
    size = world_size()
    if not 0 <= src < size:
        raise UsageError(f"broadcast(src={src}) asks for a rank that is not there: ranks are 0 to {size - 1}.")
    group = group_for("broadcast")
    if group is None:
        return mapped(x, _detached)
    box = [_moved(x, CPU) if group.world.rank == src else None]
    dist.broadcast_object_list(box, src)
    return _moved(box[0], group.device)


def any_rank(flag: Any) -> bool:
    """Whether ``flag`` is true on at least one rank; the same answer on all.

    >>> any_rank(False)
    False
    """
    return reduce_sum(int(bool(flag))) > 0


def all_ranks(flag: Any) -> bool:
    """Whether ``flag`` is true on every rank; the same answer on all.

    >>> all_ranks(True)
    True
    """
    return reduce_sum(int(bool(flag))) == world_size()


def group_for(name: str, of: str = "") -> Group | None:
    """The group on which the collective ``name`` runs, once all ranks are there; ``None`` where this rank is the only one.

    Args:
        name: of the function, for error texts.
        of: what it is given, which must be the same on all ranks.
    """
    group = callers(name)
    if group is not None:
        group.meet(f"parwrap.{name} of {of}" if of else f"parwrap.{name}")
    return group


def callers(name: str) -> Group | None:
    """As :func:`group_for`, without waiting for the other ranks."""
    group = open_group()
    if group is None:
        if not is_beside() and detect(os.environ).size > 1:
            raise UsageError(
                f"parwrap.{name}() needs the other ranks, and no process group is open here: "
                "call it inside a function decorated with @parwrap.distributed, or inside `with parwrap.distributed():`."
            )
        return None
    if is_alone():
        raise UsageError(
            f"parwrap.{name}() would wait for ever: only this rank runs what @parwrap.rank_zero_only guards. "
            "Call it outside of that function."
        )
    return group


def mapped(x: Any, leaf: Callable[[Any], Any]) -> Any:
    """``x`` with ``leaf`` applied to whatever is not a dict, list or tuple."""
    if isinstance(x, dict):
        copied = copy.copy(x)
        for key in sorted(x, key=repr):  # ranks may have filled theirs in another order
            copied[key] = mapped(x[key], leaf)
        return copied
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*(mapped(value, leaf) for value in x))
    if isinstance(x, (list, tuple)):
        return type(x)([mapped(value, leaf) for value in x])
    return leaf(x)


class _Away:
    """A tensor from an accelerator, on the CPU."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def sent(x: Any) -> Any:
    """``x`` as it is sent to other ranks: tensors detached and on the CPU, with a mark on those that were not."""

    def away(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach() if leaf.device.type == "cpu" else _Away(leaf.detach().cpu())

    return mapped(x, away)


def arrived(x: Any, device: torch.device) -> Any:
    """What was :func:`sent`, with the marked tensors on ``device``."""
    return mapped(x, lambda leaf: leaf.tensor.to(device) if isinstance(leaf, _Away) else leaf)


def _moved(x: Any, device: torch.device) -> Any:
    """``x`` with its tensors detached and on ``device``."""
    return mapped(x, lambda leaf: leaf.detach().to(device) if isinstance(leaf, torch.Tensor) else leaf)


def _described(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" if tensor.dim() else str(tensor.dtype).removeprefix("torch.")


def _detached(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _reduce(name: str, x: Any, finish: Callable[[Any, int], Any]) -> Any:
    leaves: list[torch.Tensor] = []
    mapped(x, lambda leaf: leaves.append(_as_tensor(name, leaf)))
    group = group_for(name, of=", ".join(_described(leaf) for leaf in leaves[:MOST_DESCRIBED]))
    size = 1
    if group is not None:
        size = group.world.size
        leaves = all_reduced(leaves, group)
    totals = iter(leaves)

    def result(leaf: Any) -> Any:
        total = next(totals)
        if not isinstance(leaf, torch.Tensor):
            return finish(total.item(), size)
        finished = finish(total.to(leaf.device), size)
        return finished.to(leaf.dtype) if leaf.dtype.is_floating_point or leaf.dtype.is_complex else finished

    return mapped(x, result)


def _as_tensor(name: str, leaf: Any) -> torch.Tensor:
    """A new tensor to sum ``leaf`` in: wide enough that a sum over many ranks does not lose what the leaf has."""
    if isinstance(leaf, torch.Tensor):
        wide = {torch.float16: torch.float32, torch.bfloat16: torch.float32}.get(leaf.dtype, leaf.dtype)
        return leaf.detach().to(wide if wide.is_floating_point or wide.is_complex else torch.int64, copy=True)
    if isinstance(leaf, Number):
        integral = isinstance(leaf, (bool, int)) or hasattr(leaf, "__index__")
        return torch.tensor(leaf, dtype=torch.int64 if integral else torch.float64)
    raise UsageError(f"parwrap.{name}() takes tensors, numbers and dicts, lists and tuples of them, not {type(leaf).__name__} ({leaf!r}).")


def all_reduced(leaves: list[torch.Tensor], group: Group) -> list[torch.Tensor]:
    """The sums of ``leaves`` over the ranks, one collective for each dtype."""
    home = group.device if group.backend == "nccl" else CPU
    reduced = list(leaves)
    for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
        where = [index for index, leaf in enumerate(leaves) if leaf.dtype == dtype]
        flat = torch.cat([leaves[index].reshape(-1).to(home) for index in where])
        dist.all_reduce(flat)
        for index, part in zip(where, flat.split([leaves[index].numel() for index in where]), strict=True):
            reduced[index] = part.view(leaves[index].shape)
    return reduced
