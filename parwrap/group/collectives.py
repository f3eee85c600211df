"""The collectives that users call: on tensors, numbers and nested dicts, lists and tuples of them.

All of them also work on one rank without a launcher. Gradients are averaged elsewhere, by the strategies.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from parwrap.errors import RankMismatchError, UsageError
from parwrap.group.group import Group, is_alone, is_outside_loop, open_group, world_size
from parwrap.system.structures import Structure, described, difference, digest, mapped, mixed_dtypes, number_dtype
from parwrap.world.world import detect

__all__ = [
    "AloneError",
    "all_ranks",
    "all_reduced",
    "any_rank",
    "arrived",
    "barrier",
    "broadcast",
    "callers",
    "differing_structures",
    "gather",
    "gathered_objects",
    "group_for",
    "home",
    "reduce_mean",
    "reduce_sum",
    "refuse_difference",
    "sent",
    "sums_of",
]

CPU = torch.device("cpu")

ALIKE = (
    "parwrap cannot guess which values belong together: pass the same keys, lengths, shapes and dtypes on every rank, with zeros where a "
    "rank has nothing, or use parwrap.gather, which accepts different structures."
)


class AloneError(UsageError):
    """A collective on a single rank."""


def barrier() -> None:
    """Wait until all ranks have called this function."""
    if group := group_for("barrier"):
        dist.barrier(device_ids=[group.device.index] if group.backend == "nccl" else None)


def reduce_sum(x: Any) -> Any:
    """The sum of ``x`` over all ranks, on every rank.

    Args:
        x: a tensor or array (any shape), a number, or a nested dict, list, tuple or dataclass of these. Keys, lengths, shapes and dtypes
            must be the same on every rank. Only numbers and 0-dimensional tensors may differ in type: an ``int`` and a ``float`` make a
            ``float``.

    Returns:
        The same structure with new tensors and arrays (detached, on the device and of the dtype they came in; integers and bool
        as int64) and plain numbers.

    Raises:
        RankMismatchError: the ranks' structures differ; on every rank, with the difference.
        UsageError: ``x`` contains another object.

    >>> reduce_sum({"correct": 31, "loss": torch.tensor([1.5])})
    {'correct': 31, 'loss': tensor([1.5000])}
    """
    return _reduce("reduce_sum", x, lambda total, size: total)


def reduce_mean(x: Any) -> Any:
    """The mean of ``x`` over all ranks, on every rank, with equal weights.

    The argument and result are as in :func:`reduce_sum`, but the mean of integers is a float.

    >>> reduce_mean([2, 0.5])
    [2.0, 0.5]
    """
    return _reduce("reduce_mean", x, lambda total, size: total / size)


def gather(x: Any) -> list[Any]:
    """Every rank's ``x``, as a list in the order of ranks, on every rank.

    Args:
        x: anything that pickles; tensors may differ in shape between ranks and arrive detached, on this rank's device.

    Raises:
        UsageError: a rank's ``x`` does not pickle; on every rank.

    >>> gather("here")
    ['here']
    """
    group = group_for("gather")
    if group is None:
        return [mapped(x, _detached)]
    return [_moved(each, group.device) for each in gathered_objects("gather", _moved(x, CPU), group)]


def broadcast(x: Any, src: int = 0) -> Any:
    """Rank ``src``'s ``x``, on every rank. The values of other ranks are ignored.

    Args:
        x: anything that pickles; tensors arrive detached, on this rank's device.
        src: the rank whose ``x`` is sent, the same on every rank.

    Raises:
        RankMismatchError: the ranks pass different ``src``; on every rank.
        UsageError: no rank has that number, or its ``x`` does not pickle; on every rank.

    >>> broadcast({"lr": 0.1})
    {'lr': 0.1}
    """
    group = callers("broadcast")
    if group is not None:
        _compared("broadcast", {"src": f"{src}"}, group, "Pass the same src on every rank.")
    size = world_size()
    if not 0 <= src < size:
        raise UsageError(f"broadcast(src={src}) names a rank that does not exist: ranks go from 0 to {size - 1}.")
    if group is None:
        return mapped(x, _detached)
    box = [_pickled(_moved(x, CPU)) if group.world.rank == src else None]
    dist.broadcast_object_list(box, src)
    return _moved(_unpickled("broadcast", box, [src])[0], group.device)


def any_rank(flag: Any) -> bool:
    """Whether ``flag`` is true on at least one rank. All ranks get the same answer.

    >>> any_rank(False)
    False
    """
    return reduce_sum(int(bool(flag))) > 0


def all_ranks(flag: Any) -> bool:
    """Whether ``flag`` is true on every rank. All ranks get the same answer.

    >>> all_ranks(True)
    True
    """
    return reduce_sum(int(bool(flag))) == world_size()


def group_for(name: str) -> Group | None:
    """The group for the collective ``name``, once all ranks have reached it; ``None`` if this rank is the only one."""
    group = callers(name)
    if group is not None:
        group.synchronize(f"parwrap.{name}")
    return group


def callers(name: str) -> Group | None:
    """Like :func:`group_for`, without waiting for the other ranks."""
    group = open_group()
    if group is None:
        if not is_outside_loop() and detect(os.environ).size > 1:
            raise UsageError(
                f"parwrap.{name}() needs the other ranks, but no process group is open here: call it inside a function decorated with "
                "@parwrap.distributed, or inside `with parwrap.distributed():`."
            )
        return None
    if is_alone():
        raise AloneError(
            f"parwrap.{name}() would wait forever, because only this rank runs a function decorated with @parwrap.rank_zero_only. Call "
            "it outside of that function."
        )
    return group


class _MovedToCPU:
    """A CPU copy of an accelerator's tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def sent(x: Any) -> Any:
    """``x`` in the form that is sent to other ranks: tensors are detached and on the CPU, and those from an accelerator are marked."""

    def away(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach() if leaf.device.type == "cpu" else _MovedToCPU(leaf.detach().cpu())

    return mapped(x, away)


def arrived(x: Any, device: torch.device) -> Any:
    """The received ``x``, with the marked tensors on ``device``."""
    return mapped(x, lambda leaf: leaf.tensor.to(device) if isinstance(leaf, _MovedToCPU) else leaf)


def _moved(x: Any, device: torch.device) -> Any:
    """``x`` with its tensors detached and on ``device``."""
    return mapped(x, lambda leaf: leaf.detach().to(device) if isinstance(leaf, torch.Tensor) else leaf)


def gathered_objects(name: str, x: Any, group: Group) -> list[Any]:
    """Every rank's ``x``, in the order of ranks, once all ranks have reached the collective ``name``.

    Raises:
        UsageError: a rank's ``x`` cannot be pickled.
    """
    gathered: list[Any] = [None] * group.world.size
    dist.all_gather_object(gathered, _pickled(x))
    return _unpickled(name, gathered, range(group.world.size))


def _pickled(x: Any) -> bytes | str:
    """``x`` pickled, or the reason why it cannot be. If one rank raised an error here, the others would wait for it in a collective."""
    try:
        return pickle.dumps(x)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _unpickled(name: str, pickled: list[Any], ranks: Iterable[int]) -> list[Any]:
    for rank, each in zip(ranks, pickled, strict=True):
        if isinstance(each, str):
            raise UsageError(f"parwrap.{name} sends pickled objects to the other ranks, but rank {rank}'s cannot be pickled: {each}")
    return [pickle.loads(each) for each in pickled]


def _detached(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _reduce(name: str, x: Any, finish: Callable[[Any, int], Any]) -> Any:
    group = callers(name)
    dtypes = [] if group is None else _compared(name, described(x), group)
    leaves: list[torch.Tensor] = []
    mapped(x, lambda leaf: leaves.append(_as_tensor(name, leaf)))
    size = 1
    if group is not None:
        size = group.world.size
        leaves = [leaf.to(dtype or leaf.dtype) for leaf, dtype in zip(leaves, dtypes or [None] * len(leaves), strict=True)]
        leaves = all_reduced(leaves, group)
    totals = iter(leaves)

    def result(leaf: Any) -> Any:
        total = next(totals)
        if isinstance(leaf, np.ndarray):
            finished = finish(total, size).numpy()
            return finished.astype(leaf.dtype) if leaf.dtype.kind in "fc" else finished
        if not isinstance(leaf, torch.Tensor):
            return finish(total.item(), size)
        finished = finish(total.to(leaf.device), size)
        return finished.to(leaf.dtype) if leaf.dtype.is_floating_point or leaf.dtype.is_complex else finished

    return mapped(x, result)


def _compared(name: str, structure: Structure, group: Group, remedy: str = ALIKE) -> list[torch.dtype | None]:
    """Compare the ``structure`` of the argument of the collective ``name`` with those of the other ranks.

    Args:
        remedy: advice in the error if they differ.

    If numbers of different types are mixed, the dtype to send each leaf in; otherwise an empty list.

    Raises:
        RankMismatchError: the structures differ.
    """
    structures = differing_structures(name, structure, group)
    refuse_difference(name, structures, remedy)
    return mixed_dtypes(structure, structures.values()) if structures else []


def differing_structures(name: str, structure: Structure, group: Group) -> dict[int, Structure]:
    """The ``structure`` of each rank in the collective ``name``; empty if all ranks have the same."""
    mine = digest(structure)
    if group.coordinator is not None:
        ranks = group.synchronize(f"parwrap.{name}", mine)
        return {} if group.coordinator.alike and len(ranks) == group.world.size else group.share("structure", structure, ranks)
    digests = torch.empty(group.world.size, 1, dtype=torch.int64, device=home(group))
    dist.all_gather(list(digests), torch.tensor([mine], device=digests.device))
    return {} if (digests == mine).all() else dict(enumerate(gathered_objects(name, structure, group)))


def refuse_difference(name: str, structures: Mapping[int, Structure], remedy: str) -> None:
    """Raise a ``RankMismatchError`` with the differences between the ``structures`` in the collective ``name``, if any."""
    if differences := difference(structures):
        raise RankMismatchError(f"parwrap.{name}() got different structures on different ranks: {differences}. {remedy}")


def _as_tensor(name: str, leaf: Any) -> torch.Tensor:
    """A new tensor to sum ``leaf`` in, wide enough that a sum over many ranks loses no precision of the leaf."""
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
        leaf = torch.from_numpy(leaf.astype(np.int64) if leaf.dtype.kind in "biu" else np.ascontiguousarray(leaf).reshape(leaf.shape))
    if isinstance(leaf, torch.Tensor):
        wide = {torch.float16: torch.float32, torch.bfloat16: torch.float32}.get(leaf.dtype, leaf.dtype)
        return leaf.detach().to(wide if wide.is_floating_point or wide.is_complex else torch.int64, copy=True)
    if dtype := number_dtype(leaf):
        return torch.tensor(complex(leaf) if dtype.is_complex else float(leaf) if dtype.is_floating_point else int(leaf), dtype=dtype)
    raise UsageError(
        f"parwrap.{name}() takes tensors, arrays, numbers and dicts, lists, tuples and dataclasses of them, "
        f"not {type(leaf).__name__} ({leaf!r})."
    )


def all_reduced(leaves: list[torch.Tensor], group: Group) -> list[torch.Tensor]:
    """The sums of ``leaves`` over the ranks, one collective for each dtype."""
    where_sent = home(group)
    reduced = list(leaves)
    for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
        where = [index for index, leaf in enumerate(leaves) if leaf.dtype == dtype]
        flat = torch.cat([leaves[index].reshape(-1).to(where_sent) for index in where])
        dist.all_reduce(flat)
        for index, part in zip(where, flat.split([leaves[index].numel() for index in where]), strict=True):
            reduced[index] = part.view(leaves[index].shape)
    return reduced


def sums_of(numbers: Sequence[float], group: Group) -> list[float]:
    """The sums over the ranks of each of ``numbers``."""
    return all_reduced([torch.tensor(numbers, dtype=torch.float64)], group)[0].tolist()


def home(group: Group) -> torch.device:
    """The device that the collectives of ``group`` need for tensors."""
    return group.device if group.backend == "nccl" else CPU
