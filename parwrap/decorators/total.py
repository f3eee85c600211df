"""``total``: numbers that the script computes from a pass over a loader, for all samples of the pass."""

from __future__ import annotations

from typing import Any, TypeVar
from zlib import crc32

import numpy as np
import torch

from parwrap.decorators.distributed import open_loop, trains_apart
from parwrap.errors import RankMismatchError, UsageError
from parwrap.loop.one_pass import Pass
from parwrap.ranks.agreement import agree
from parwrap.ranks.collectives import as_sums, different_structures, group_for, summed
from parwrap.ranks.group import Group
from parwrap.ranks.structures import described, leaves, mapped
from parwrap.rows.tensors import whole_is_open, whole_result

T = TypeVar("T")

__all__ = ["total"]

ROUNDING = 256
"""How many units in the last place two numbers of a whole pass may differ: processors of different kinds round differently."""


def total(values: T, *, of: Any = None) -> T:
    """Return ``values``, computed from the last pass over a loader, for the samples that all ranks have read in it. All ranks call it.

    If ranks have read shares, the values of all ranks are added up. If every rank has read everything, the values are returned as they
    are. So one line is right for a loop that trains and then validates. With ``batch="whole"`` they are whole already.

    Call it with sums over samples, such as numbers of correct answers, losses times batch sizes, and counts; divide afterwards. A loss
    after its ``backward()`` is the mean over ranks already: a mean of such losses over batches needs no total.

    Args:
        values: a tensor or array (any shape), a number, or a nested dict, list, tuple or dataclass of these. Keys, lengths, shapes and
            dtypes must be the same on every rank.
        of: the loader that the values are computed from. It may be left out if no pass is open, and all passes since the last total were
            read in shares, or all were read whole.

    Returns:
        The same structure with new tensors and arrays, as :func:`parwrap.reduce_sum` returns it. On one rank, the values themselves.

    Raises:
        UsageError: the values contain another object; ``of`` was not read; or it is missing, and there were passes of both kinds.
        RankMismatchError: the ranks' structures differ; or their values differ after a pass that every rank has read whole.

    >>> total({"correct": 31, "seen": 48})
    {'correct': 31, 'seen': 48}
    """
    group = group_for("total")
    if whole_is_open() is not None:
        values, group = whole_result(values), None
    if group is None or trains_apart():
        return summed("total", values, None)
    loop = open_loop()
    if loop is None:
        raise UsageError(
            "parwrap.total() adds up what ranks have computed from shares, but parwrap divides no loader here, because the script "
            "distributes itself. Write parwrap.reduce_sum for values of a part of the data."
        )
    totals = loop.totals
    if totals.evaluating:
        raise UsageError(
            "parwrap.total() is called in a function that @parwrap.evaluate divides, and reduce= merges its results already. Call it "
            "outside, or leave it out."
        )
    last = totals.decided() if of is None else totals.of(of)
    values = _agreed(values, last, None if of is None else totals.other_kind(of, last), group)
    if not last.shared:
        return summed("total", values, None)
    loop.same_step.catch_up()
    totals.warn_of_losses(last, leaves(values))
    count = totals.count(last)
    values, repeated = summed("total", (values, last.repeated if count is None else count.repeated), group)
    totals.repeated(last, repeated)
    return values


def _agreed(values: Any, last: Pass, share: Pass | None, group: Group) -> Any:
    """``values``, once all ranks total a pass that was read in the same way, and after a whole pass the same values; then those of rank 0.

    Args:
        values: the values.
        last: the pass.
        share: an earlier pass over the same loader in shares, whose numbers have no total.
        group: the ranks.

    Raises:
        RankMismatchError: they do not.
    """
    structure = described(values)
    sums = [] if last.shared else as_sums("total", values, 1)
    digest = crc32(repr((last.shared, structure)).encode())
    for each in sums:
        digest = crc32(each.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), digest)

    def error(everyones: list[Any]) -> RankMismatchError | None:
        shared = [each for each, _, _ in everyones]
        if len(set(shared)) > 1:
            return RankMismatchError(
                f"parwrap.total() totals the pass at {last.place}, which rank {shared.index(True)} has read in shares and rank "
                f"{shared.index(False)} whole. Name the same loader on every rank: parwrap.total(values, of=loader)."
            )
        if different := different_structures("total", [structure for _, structure, _ in everyones]):
            return different
        if differs := _differing([sums for _, _, sums in everyones]):
            at, rank = differs
            expressions = list(leaves(values))
            name = f" of values{expressions[at]}" if expressions[at] else ""
            shown = [_shown(each[at]) for _, _, each in everyones]
            earlier = f"If they come from the share read at {share.place}, total them before the next pass. " if share else ""
            return RankMismatchError(
                f"parwrap.total() got different numbers{name} after a pass that every rank has read whole, at {last.place}: {shown[0]} on "
                f"rank 0 and {shown[rank]} on rank {rank}. {earlier}If they come from another loader, name it: "
                "parwrap.total(values, of=loader). If each rank has read other samples, as of a stream that divides itself, "
                "parwrap.reduce_sum adds them up. Times and draws of each rank have no total: parwrap.broadcast(value) takes rank 0's."
            )
        return None

    everyones = agree(group, "parwrap.total", digest, lambda: (last.shared, structure, [each.cpu() for each in sums]), error)
    if everyones is None or last.shared:
        return values
    firsts = iter(everyones[0][2])
    return mapped(values, lambda leaf: _like(leaf, next(firsts)))


def _like(leaf: Any, value: torch.Tensor) -> Any:
    """``value`` as an object of the type of ``leaf``."""
    if isinstance(leaf, torch.Tensor):
        return value.to(leaf.device, leaf.dtype)
    return value.numpy().astype(leaf.dtype) if isinstance(leaf, np.ndarray) else value.item()


def _differing(everyones: list[list[torch.Tensor]]) -> tuple[int, int] | None:
    """The first value that differs between rank 0 and another rank by more than rounding, and that rank."""
    for rank, theirs in enumerate(everyones):
        for at, (mine, other) in enumerate(zip(everyones[0], theirs, strict=True)):
            inexact = mine.is_floating_point() or mine.is_complex()
            tolerance = ROUNDING * float(np.finfo(np.float32).eps) if inexact else 0.0
            if not torch.allclose(mine, other.to(mine.dtype), rtol=tolerance, atol=0.0, equal_nan=True):
                return at, rank
    return None


def _shown(value: torch.Tensor) -> str:
    return f"{value.item():.9g}" if value.numel() == 1 else f"a tensor with the sum {value.sum().item():.9g}"
