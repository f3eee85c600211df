"""Ranks make sure that they are about to do the same, before they send data that would otherwise be mixed up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from parwrap.errors import LockstepError
from parwrap.places import script_place
from parwrap.ranks.group import Group

__all__ = ["agree", "agree_on", "first_difference", "first_other", "home"]

CPU = torch.device("cpu")

BITS = 62
"""The number of bits of the numbers that ranks compare; their negatives must fit into int64."""


def agree(
    group: Group,
    kind: str,
    digest: int = 0,
    details: Callable[[], object] = lambda: None,
    error: Callable[[list[Any]], Exception | None] = lambda all_ranks: None,
) -> list[Any] | None:
    """Wait until all ranks have called this, and compare their ``kind`` and ``digest``.

    The ranks send one message of constant size, whatever their number. Only if they differ, they also send their details.

    Args:
        group: the process group.
        kind: what the ranks do, such as ``"parwrap.gather"``.
        digest: a number that is equal on ranks that agree.
        details: a function that returns what ``digest`` stands for, which must pickle.
        error: a function that makes an error from the details of all ranks, or ``None`` if they may differ in this way.

    Returns:
        The details of all ranks in the order of ranks, if they differ without an error; otherwise ``None``.

    Raises:
        LockstepError: the ranks differ in ``kind``; on every rank.
        Exception: the result of ``error``; on every rank.
    """
    mine = [_number(kind), digest % (1 << BITS)]
    largest = torch.tensor([*mine, *(-number for number in mine)], device=CPU if group.control else home(group))
    everyone: list[Any] = [None] * group.world.size
    with group.control_message(kind):
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group.control)
        *maxima, kind_minimum, digest_minimum = largest.tolist()
        if maxima == [-kind_minimum, -digest_minimum]:
            return None
        dist.all_gather_object(everyone, (kind, str(script_place()), details()), group=group.control)
    if len({kind for kind, _, _ in everyone}) > 1:
        raise LockstepError(_different_kinds(everyone))
    found = [detail for _, _, detail in everyone]
    if (raised := error(found)) is not None:
        raise raised
    return found


def agree_on(group: Group, kind: str, value: object, error: Callable[[list[Any]], Exception | None]) -> list[Any] | None:
    """As :func:`agree`, with a ``value`` that pickles, and whose ``repr`` is equal on ranks that agree."""
    return agree(group, kind, _number(repr(value)), lambda: value, error)


def first_other(all_ranks: Sequence[Any]) -> tuple[int, Any]:
    """The first rank whose entry in ``all_ranks`` differs from that of rank 0, and this entry.

    >>> first_other(["a", "a", "b"])
    (2, 'b')
    """
    return next((rank, each) for rank, each in enumerate(all_ranks) if each != all_ranks[0])


def first_difference(all_ranks: Sequence[Sequence[Any]], show: Callable[[Any], str]) -> tuple[int, str, int, str]:
    """Find the first entry in which the list of another rank differs from that of rank 0.

    Returns its place, rank 0's entry, the other rank, and that rank's entry. The entries are as ``show`` words them, or ``"none"`` after
    the end of a list.

    >>> first_difference([["a"], ["a"], ["a", "b"]], repr)
    (1, 'none', 2, "'b'")
    """
    rank, other = first_other(all_ranks)
    pairs = enumerate(zip_longest(all_ranks[0], other))
    at, (mine, theirs) = next((at, pair) for at, pair in pairs if pair[0] != pair[1])
    return at, "none" if mine is None else show(mine), rank, "none" if theirs is None else show(theirs)


def home(group: Group) -> torch.device:
    """The device on which the collectives of ``group`` need their tensors."""
    return group.device if group.backend == "nccl" else CPU


def _number(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(errors="replace"), digest_size=8).digest(), "little") % (1 << BITS)


def _different_kinds(everyone: list[tuple[str, str, Any]]) -> str:
    """The text of the error if ranks do different things: the first two of them.

    >>> _different_kinds([("parwrap.gather", "train.py:8", None), ("parwrap.barrier", "train.py:9", None)]).partition(".py:9")[0]
    'rank 0 is in parwrap.gather at train.py:8, but rank 1 is in parwrap.barrier at train'
    """
    kind, place, _ = everyone[0]
    other = next(rank for rank, each in enumerate(everyone) if each[0] != kind)
    others_kind, others_place, _ = everyone[other]
    return (
        f"rank 0 is in {kind} at {place}, but rank {other} is in {others_kind} at {others_place}. Every rank must make the same calls in "
        "the same order, because each waits for all others. Let the ranks decide alike, for example with parwrap.any_rank(condition)."
    )
