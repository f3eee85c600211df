"""The collectives that users call: on tensors, numbers and nested dicts, lists and tuples of them.

All of them also work on one rank without a launcher. Gradients are averaged elsewhere, by the strategies.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from parwrap.errors import RankMismatchError, UsageError, counted, shortened
from parwrap.ranks.agreement import agree, agree_on, first_other, home
from parwrap.ranks.group import Group, is_alone, is_outside, open_group, world_size
from parwrap.ranks.structures import Structure, described, difference, leaves, mapped, mixed_dtypes, number_dtype
from parwrap.ranks.world import detect

T = TypeVar("T")

__all__ = [
    "ALIKE",
    "all_ranks",
    "any_rank",
    "as_sums",
    "barrier",
    "broadcast",
    "by_kind",
    "different_structures",
    "gather",
    "gathered",
    "group_for",
    "reduce_mean",
    "reduce_sum",
    "summed",
]

CPU = torch.device("cpu")

ALIKE = (
    "parwrap cannot guess which values belong together: pass the same keys, lengths, shapes and dtypes on every rank, with zeros where a "
    "rank has nothing, or use parwrap.gather, which accepts different structures."
)


def barrier() -> None:
    """Wait until all ranks have called this function.

    Raises:
        LockstepError: on every rank, if one is in another collective.

    >>> barrier()
    """
    if group := group_for("barrier"):
        _met("barrier", group)
        if group.backend == "nccl":  # wait for the work on the devices too
            dist.barrier(device_ids=[group.device.index])
        group.observer.after_barrier()


def reduce_sum(x: T) -> T:
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
        LockstepError: another rank is in another collective; on every rank.
        UsageError: ``x`` contains another object, a sparse tensor, or an integer whose sum may not fit into 64 bits.

    >>> reduce_sum({"correct": 31, "loss": torch.tensor([1.5])})
    {'correct': 31, 'loss': tensor([1.5000])}
    """
    group = group_for("reduce_sum")
    total = summed("reduce_sum", x, group)
    if group is not None:
        group.observer.summed(lambda: _is_multiple(total, x, group.world.size))
    return total


def reduce_mean(x: Any) -> Any:
    """The mean of ``x`` over all ranks, on every rank, with equal weights.

    The argument and result are as in :func:`reduce_sum`, but the mean of integers is a float.

    >>> reduce_mean([2, 0.5])
    [2.0, 0.5]
    """
    return _reduce("reduce_mean", x, group_for("reduce_mean"), lambda total, size: total / size)


def gather(x: T) -> list[T]:
    """Every rank's ``x``, as a list in the order of ranks, on every rank. With ``batch="whole"`` each has all: a list with ``x`` alone.

    Args:
        x: anything that pickles; tensors may differ in shape between ranks and arrive detached, on this rank's device.

    Raises:
        UsageError: a rank's ``x`` does not pickle; on every rank.

    >>> gather("here")
    ['here']
    """
    group = group_for("gather")
    if group is not None and group.observer.whole(x):
        return [mapped(x, _detached)]
    everyones = gathered(x, group)
    if group is not None:
        group.observer.summed(lambda: False)
    return everyones


def gathered(x: Any, group: Group | None) -> list[Any]:
    """The ``x`` of each rank of ``group``, as :func:`gather` returns it."""
    if group is None:
        return [mapped(x, _detached)]
    _met("gather", group)
    pickled: list[Any] = [None] * group.world.size
    mine = _pickled(_moved(x, CPU))
    with group.control_message("parwrap.gather"):
        dist.all_gather_object(pickled, mine, group=group.control)
    return [_moved(each, group.device) for each in _unpickled("gather", pickled, range(group.world.size))]


def broadcast(x: T, src: int = 0) -> T:
    """Rank ``src``'s ``x``, on every rank. The values of other ranks are ignored.

    Args:
        x: anything that pickles; tensors arrive detached, on this rank's device.
        src: the rank whose ``x`` is sent, the same on every rank.

    Raises:
        RankMismatchError: the ranks pass different ``src``; on every rank.
        UsageError: no rank has the number ``src``, or the ``x`` of that rank does not pickle; on every rank.

    >>> broadcast({"lr": 0.1})
    {'lr': 0.1}
    """
    group = group_for("broadcast")
    if isinstance(src, bool) or not isinstance(src, int):
        raise UsageError(f"broadcast(src={src!r}): src must be the number of a rank.")
    if group is not None:
        agree(group, "parwrap.broadcast", src, lambda: src, _different_sources)
    size = world_size()
    if not 0 <= src < size:
        raise UsageError(f"broadcast(src={src}) names a rank that does not exist: ranks go from 0 to {size - 1}.")
    if group is None:
        return mapped(x, _detached)
    box = [_pickled(_moved(x, CPU)) if group.world.rank == src else None]
    with group.control_message("parwrap.broadcast"):
        dist.broadcast_object_list(box, src, group=group.control)
    return _moved(_unpickled("broadcast", box, [src])[0], group.device)


def any_rank(flag: Any) -> bool:
    """Whether ``flag`` is true on at least one rank. All ranks get the same answer.

    >>> any_rank(False)
    False
    """
    return bool(summed("any_rank", int(bool(flag)), group_for("any_rank")) > 0)


def all_ranks(flag: Any) -> bool:
    """Whether ``flag`` is true on every rank. All ranks get the same answer.

    >>> all_ranks(True)
    True
    """
    return bool(summed("all_ranks", int(bool(flag)), group_for("all_ranks")) == world_size())


def group_for(name: str) -> Group | None:
    """The group for the collective ``name``; ``None`` if this process is the only rank, or acts alone as in :func:`is_outside`.

    Raises:
        UsageError: other ranks cannot take part here.
    """
    group = open_group()
    if group is None:
        if not is_outside() and detect(os.environ).size > 1:
            raise UsageError(
                f"parwrap.{name}() needs the other ranks, but no process group is open here: call it inside a function decorated with "
                "@parwrap.distributed, or inside `with parwrap.distributed():`."
            )
        return None
    if is_alone():
        raise UsageError(
            f"parwrap.{name}() would wait forever, because code inside @parwrap.rank_zero_only or rank_zero_first runs without the other "
            "ranks. Make this call outside of that code."
        )
    return group


def _moved(x: Any, device: torch.device) -> Any:
    """``x`` with its tensors detached and on ``device``."""
    return mapped(x, lambda leaf: leaf.detach().to(device) if isinstance(leaf, torch.Tensor) else leaf)


def _pickled(x: Any) -> bytes | str:
    """``x`` pickled, or the reason why it cannot be. If one rank raised an error here, the others would wait for it in a collective."""
    try:
        return pickle.dumps(x)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _unpickled(name: str, pickled: list[Any], ranks: Iterable[int]) -> list[Any]:
    for rank, each in zip(ranks, pickled, strict=True):
        if isinstance(each, str):
            raise UsageError(
                f"parwrap.{name} sends pickled objects to the other ranks, but rank {rank}'s cannot be pickled: {each}. Send tensors or "
                "numbers, or objects of classes that are defined at the top of a module."
            )
    return [pickle.loads(each) for each in pickled]


def _detached(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _met(name: str, group: Group) -> None:
    """Return once all ranks are in the collective ``name``, whatever their arguments."""
    agree(group, f"parwrap.{name}")


def _different_sources(sources: list[int]) -> RankMismatchError:
    rank, other = first_other(sources)
    return RankMismatchError(
        f"parwrap.broadcast() got src={sources[0]} on rank 0 and src={other} on rank {rank}, but only one rank can send. Pass "
        "the same src on every rank."
    )


def summed(name: str, x: Any, group: Group | None) -> Any:
    """The sum of ``x`` over the ranks of ``group``, as :func:`reduce_sum` returns it, for the collective ``name``."""
    return _reduce(name, x, group, _total)


def _total(total: Any, size: int) -> Any:
    return total


def _is_multiple(total: Any, x: Any, size: int) -> bool:
    """Whether ``total`` is ``size`` times ``x``, and not 0."""
    pairs = [
        (torch.as_tensor(all_ranks), torch.as_tensor(mine))
        for all_ranks, mine in zip(leaves(total).values(), leaves(x).values(), strict=True)
    ]
    alike = all(torch.allclose(all_ranks.double(), size * mine.double(), 1e-6, 0) for all_ranks, mine in pairs)
    return alike and any(bool(mine.any()) for _, mine in pairs)


def _reduce(name: str, x: Any, group: Group | None, finish: Callable[[Any, int], Any]) -> Any:
    """The sum of ``x`` over the ranks of ``group``, after ``finish`` has got each sum and the number of ranks."""
    dtypes = [] if group is None else _common_dtypes(name, described(x), group)
    size = 1 if group is None else group.world.size
    parts = as_sums(name, x, size)
    if group is not None:
        parts = [part.to(dtype or part.dtype) for part, dtype in zip(parts, dtypes or [None] * len(parts), strict=True)]
        with group.control_message(f"parwrap.{name}"):
            parts = _all_reduced(parts, group)
    totals = iter(parts)

    def result(leaf: Any) -> Any:
        total = next(totals)
        if isinstance(leaf, np.ndarray):
            finished = finish(total if leaf.dtype.kind in "fc" or finish is _total else total.double(), size).numpy()
            return finished.astype(leaf.dtype) if leaf.dtype.kind in "fc" else finished
        if not isinstance(leaf, torch.Tensor):
            return finish(total.item(), size)
        finished = finish(total.to(leaf.device), size)
        return finished.to(leaf.dtype) if leaf.dtype.is_floating_point or leaf.dtype.is_complex else finished

    return mapped(x, result)


def different_structures(name: str, structures: list[Structure], then: str = ALIKE) -> RankMismatchError | None:
    """The error if the ``structures`` of the ranks' arguments of the collective ``name`` differ; ``then`` is its advice."""
    if different := difference(dict(enumerate(structures))):
        return RankMismatchError(f"parwrap.{name}() got different structures on different ranks: {different}. {then}")
    return None


def _common_dtypes(name: str, structure: Structure, group: Group) -> list[torch.dtype | None]:
    """The dtype to send each leaf in, if ranks mix numbers of different types; otherwise an empty list.

    Raises:
        RankMismatchError: the ``structure`` of the argument of the collective ``name`` differs between ranks.
    """
    structures = agree_on(group, f"parwrap.{name}", structure, partial(different_structures, name))
    return mixed_dtypes(structure, structures) if structures else []


MOST = 2**63 - 1
"""The largest integer that a tensor holds."""


def as_sums(name: str, x: Any, size: int) -> list[torch.Tensor]:
    """The leaves of ``x``, each as a new tensor that holds its sum over ``size`` ranks, for the collective ``name``."""
    parts: list[torch.Tensor] = []
    mapped(x, lambda leaf: parts.append(_as_tensor(name, leaf, size)))
    return parts


def _as_tensor(name: str, leaf: Any, size: int) -> torch.Tensor:
    """A new tensor to sum ``leaf`` in, wide enough that a sum over many ranks loses no precision of the leaf."""
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
        leaf = _from_array(name, leaf)
    if isinstance(leaf, torch.Tensor):
        if leaf.layout != torch.strided:
            raise UsageError(f"parwrap.{name}() takes dense tensors, not one of layout {leaf.layout}: pass x.to_dense().")
        if leaf.is_floating_point() or leaf.is_complex():
            return leaf.detach().to(torch.float32 if leaf.dtype.itemsize < 4 else leaf.dtype, copy=True)
        whole = leaf.to(torch.int64, copy=True)
        if whole.is_cpu and whole.numel():  # to read a number of a GPU would wait for it
            for each in (int(whole.max()), int(whole.min())):
                _refuse_overflow(name, each % 2**64 if leaf.dtype == torch.uint64 else each, size)
        return whole
    if isinstance(leaf, (int, np.integer)):
        _refuse_overflow(name, int(leaf), size)
    if dtype := number_dtype(leaf):
        return torch.tensor(complex(leaf) if dtype.is_complex else float(leaf) if dtype.is_floating_point else int(leaf), dtype=dtype)
    raise UsageError(
        f"parwrap.{name}() takes tensors, arrays, numbers and dicts, lists, tuples and dataclasses of them, "
        f"not {type(leaf).__name__} ({shortened(repr(leaf), 80)}). To collect other objects, use parwrap.gather."
    )


def _from_array(name: str, array: np.ndarray) -> torch.Tensor:
    dtype = np.dtype(np.int64) if array.dtype.kind in "bi" else array.dtype.newbyteorder("=")
    try:
        return torch.from_numpy(np.ascontiguousarray(array, dtype).reshape(array.shape))
    except TypeError:  # torch has no such dtype
        known = "complex128" if array.dtype.kind == "c" else "float64"
        raise UsageError(
            f"parwrap.{name}() cannot combine arrays of {array.dtype}, because torch has no such dtype: pass x.astype(np.{known})."
        ) from None


def _refuse_overflow(name: str, number: int, size: int) -> None:
    if abs(number) > MOST // size:
        exact = ", or add them up as Python does: sum(parwrap.gather(x))" if name in ("reduce_sum", "total") else ""
        raise UsageError(
            f"parwrap.{name}() adds up whole numbers in 64 bits, so on {counted(size, 'rank')} none may be beyond {MOST // size}, but one "
            f"is {number}. Pass floats{exact}."
        )


def by_kind(items: Iterable[T], kind: Callable[[T], Any]) -> dict[Any, list[T]]:
    """``items`` by their ``kind``, such as dtype and device: those of one kind travel in one collective.

    >>> by_kind([1, 0.5, 2], type)
    {<class 'int'>: [1, 2], <class 'float'>: [0.5]}
    """
    kinds: dict[Any, list[T]] = {}
    for each in items:
        kinds.setdefault(kind(each), []).append(each)
    return kinds


def _all_reduced(leaves: list[torch.Tensor], group: Group) -> list[torch.Tensor]:
    """The sums of ``leaves`` over the ranks, one collective for each dtype."""
    where_sent = home(group)
    reduced = list(leaves)
    for where in by_kind(range(len(leaves)), lambda index: leaves[index].dtype).values():
        flat = torch.cat([leaves[index].reshape(-1).to(where_sent) for index in where])
        dist.all_reduce(flat)
        for index, part in zip(where, flat.split([leaves[index].numel() for index in where]), strict=True):
            reduced[index] = part.view(leaves[index].shape)
    return reduced
