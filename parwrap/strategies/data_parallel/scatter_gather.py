"""Cuts the arguments of a module into parts along the first dimension, and merges the outputs of the parts.

Arguments and outputs may be nested in tuples, lists, dicts and dataclasses. ``why_not`` and ``items_of_samples`` report arguments that
cannot be cut without changing the result; outputs that cannot be merged raise an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from parwrap.errors import UsageError
from parwrap.strategies.data_parallel.sharded_outputs import Pieces, are_different_gpus
from parwrap.torch_private.data_parallel import Scatter
from parwrap.torch_private.pytree import tree_flatten, tree_leaves, tree_unflatten

__all__ = ["cut", "is_number", "items_of_samples", "kinds_of", "leaves_of", "merged", "rows_of", "sizes_of", "why_not"]


def leaves_of(values: Any) -> list[Any]:
    """The leaves of nested ``values``."""
    return tree_leaves(values, is_leaf=_is_packed)


def _is_packed(value: Any) -> bool:
    """Whether ``value`` is a packed batch, which torch's pytree functions would take for a tuple of tensors."""
    return isinstance(value, PackedSequence)


def rows_of(leaves: Iterable[Any]) -> int:
    """The number of samples: the first dimension of the first tensor that has one; 0 without such a tensor.

    >>> rows_of([3, torch.ones(()), torch.ones(8, 2)])
    8
    """
    return next((leaf.size(0) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()), 0)


def sizes_of(rows: int, parts: int) -> list[int]:
    """The number of samples of each part; no part is empty.

    >>> sizes_of(5, 3), sizes_of(2, 3)
    ([2, 2, 1], [1, 1])
    """
    parts = min(rows, parts)
    return [rows // parts + (part < rows % parts) for part in range(parts)]


def why_not(leaves: Iterable[Any], rows: int) -> str | None:
    """Why a call with these ``leaves`` cannot be cut into parts of ``rows`` samples; ``None`` if it can."""
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if leaf.layout is not torch.strided or leaf.is_nested:
                return "one of its inputs is a sparse or nested tensor"
            if leaf.dim() and rows > 1 and leaf.size(0) not in (1, rows):
                return f"its inputs are tensors with {rows} and with {leaf.size(0)} rows, so the number of samples is unclear"
        elif _is_packed(leaf) or _holds_tensors(leaf):
            return f"one of its inputs is a {type(leaf).__name__}, which contains tensors"
    return None


def items_of_samples(values: Any, rows: int) -> str | None:
    """Why ``values`` cannot be cut: one that is not a tensor has as many items as there are samples; ``None`` if there is none.

    >>> items_of_samples((torch.ones(4, 2), [3, 1, 2, 2]), 4)
    'one of its inputs is a list of 4 items for 4 samples, which may have one item per sample'
    """

    def is_list(value: Any) -> bool:
        return _is_packed(value) or (isinstance(value, (list, tuple)) and _items(value) == rows)

    for leaf in tree_leaves(values, is_leaf=is_list):
        if rows > 1 and not isinstance(leaf, torch.Tensor) and _items(leaf) == rows:
            return f"one of its inputs is a {type(leaf).__name__} of {rows} items for {rows} samples, which may have one item per sample"
    return None


def _items(value: Any) -> int | None:
    """The number of items of a list without tensors or of an array; ``None`` for anything else."""
    if isinstance(value, (list, tuple)):
        return None if any(isinstance(leaf, (torch.Tensor, PackedSequence)) for leaf in tree_leaves(value)) else len(value)
    shape = getattr(value, "shape", None)
    return shape[0] if isinstance(shape, tuple) and shape else None


def _holds_tensors(leaf: Any) -> bool:
    own = () if isinstance(leaf, (torch.nn.Module, type)) else vars(leaf).values() if hasattr(leaf, "__dict__") else ()
    return any(isinstance(each, torch.Tensor) for each in own)


def cut(values: Any, sizes: Sequence[int], devices: Sequence[torch.device]) -> list[Any]:
    """``values`` for each part: its rows of tensors that have one row per sample, and everything else whole.

    Tensors on the first of ``devices`` are moved to the part's device; others, such as lengths on the CPU, stay where they are.
    """
    leaves, structure = tree_flatten(values, is_leaf=_is_packed)
    parts = [_cut(leaf, sizes, devices) for leaf in leaves]
    return [tree_unflatten([part[number] for part in parts], structure) for number in range(len(sizes))]


def _cut(leaf: Any, sizes: Sequence[int], devices: Sequence[torch.device]) -> Sequence[Any]:
    if not isinstance(leaf, torch.Tensor):
        return [leaf] * len(sizes)
    places = [device if leaf.device == devices[0] else leaf.device for device in devices]
    if isinstance(leaf, Pieces) and leaf.fits(sizes, devices):
        return leaf.taken()
    if leaf.dim() == 0 or leaf.size(0) != sum(sizes):
        return [leaf.to(place) for place in places]
    if are_different_gpus(places):
        return Scatter.apply(places, list(sizes), 0, leaf)
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return [leaf.narrow(0, start, size).to(place, copy=True) for start, size, place in zip(starts, sizes, places, strict=True)]


def kinds_of(leaves: Iterable[Any], rows: int) -> tuple:
    """The kind of each of the ``leaves``; two calls with equal results are of the same kind.

    >>> kinds_of([torch.ones(4, 2), torch.ones(1, 2), 3], 4)
    ('cut', 'whole', 'int')
    """
    return tuple(
        type(leaf).__name__ if not isinstance(leaf, torch.Tensor) else "cut" if leaf.dim() and leaf.size(0) == rows else "whole"
        for leaf in leaves
    )


def is_number(leaf: Any) -> bool:
    """Whether ``leaf`` is a single number, such as a loss or a count."""
    if isinstance(leaf, torch.Tensor):
        return not leaf.dim() and leaf.dtype is not torch.bool
    return isinstance(leaf, (int, float)) and not isinstance(leaf, bool)


Join = Callable[[list[torch.Tensor]], Any]
"""Joins the tensors of all parts, which have one row per sample."""


def merged(outputs: Sequence[Any], sizes: Sequence[int], weights: Sequence[float] | None, join: Join, who: str) -> Any:
    """Merge the ``outputs`` of the parts into one.

    Args:
        outputs: the output of each part.
        sizes: the number of samples of each part.
        weights: the weight of each part's numbers, such as a loss; ``None`` if unknown: then they must be equal in all parts.
        join: joins the tensors of the parts.
        who: the name of the module in errors.

    Raises:
        UsageError: the outputs cannot be merged.
    """
    flattened = [tree_flatten(output, is_leaf=_is_packed) for output in outputs]
    _, structure = flattened[0]
    for _, other in flattened:
        if other != structure:
            raise UsageError(f"{who} returned outputs of different structure on different replicas: {structure} and {other}.")
    leaves = zip(*(leaves for leaves, _ in flattened), strict=True)
    return tree_unflatten([_merged(list(each), sizes, weights, join, who) for each in leaves], structure)


def _merged(parts: list[Any], sizes: Sequence[int], weights: Sequence[float] | None, join: Join, who: str) -> Any:
    first = parts[0]
    if any(isinstance(part, torch.Tensor) and part.dim() for part in parts):
        if all(isinstance(part, torch.Tensor) for part in parts):
            _check_rows(parts, sizes, who)
            return join(parts)
    elif all(isinstance(part, float) for part in parts) and weights is not None:
        return sum(part * weight for part, weight in zip(parts, weights, strict=True))
    elif all(isinstance(part, torch.Tensor) and (part.is_floating_point() or part.is_complex()) for part in parts):
        if weights is None and all(_same(first, part) for part in parts):
            weights = [1 / len(parts)] * len(parts)  # so that gradients flow to all parts
        if weights is not None:
            return torch.stack([part.to(first.device) * weight for part, weight in zip(parts, weights, strict=True)]).sum(0)
    elif len({type(part) for part in parts}) == 1:
        if is_dataclass(first) and not isinstance(first, type):
            given = [field.name for field in fields(first) if field.init]
            return _built(first, {name: [getattr(part, name) for part in parts] for name in given}, sizes, weights, join, who)
        if isinstance(first, dict) and all(part.keys() == first.keys() for part in parts):  # its class is unknown to torch's pytree
            return _built(first, {key: [part[key] for part in parts] for key in first}, sizes, weights, join, who)
        if all(part is first or _same(first, part) for part in parts):
            return first
    raise UsageError(
        f"{who} returned a {type(first).__name__} that differs between replicas and does not have one row per sample, so its parts "
        "cannot be combined: return tensors whose first dimension is the batch. If it is a loss, pass loss='mean' or loss='sum'."
    )


def _built(first: Any, parts: dict[Any, list[Any]], sizes: Sequence[int], weights: Sequence[float] | None, join: Join, who: str) -> Any:
    """A new object of the class of ``first``, built from the merged values."""
    whole = {name: merged(each, sizes, weights, join, who) for name, each in parts.items()}
    try:
        made: Any = type(first)
        return made(**whole) if is_dataclass(first) else made(whole)
    except TypeError as error:
        raise UsageError(f"{who} returned a {type(first).__name__}, which cannot be rebuilt from its values ({error}).") from None


def _same(one: Any, other: Any) -> bool:
    try:
        if isinstance(one, torch.Tensor):
            return torch.allclose(one, other.to(one.device), equal_nan=True)
        return math.isclose(one, other, rel_tol=1e-5) if isinstance(one, float) else bool(one == other)
    except (ValueError, TypeError, RuntimeError):
        return False


def _check_rows(parts: list[torch.Tensor], sizes: Sequence[int], who: str) -> None:
    rows = [part.size(0) if part.dim() else 0 for part in parts]
    shapes = " and ".join(str(list(part.shape)) for part in parts)
    if any(row % size or row // size != rows[0] // sizes[0] for row, size in zip(rows, sizes, strict=True)):
        raise UsageError(
            f"{who} returned tensors of shape {shapes} for {' and '.join(map(str, sizes))} samples, which do not have one row per "
            "sample: the first dimension of its inputs and outputs must be the batch. Otherwise run it on one device, with "
            f"parwrap.data_parallel(device_ids=['{parts[0].device}'])."
        )
    if len({part.shape[1:] for part in parts}) > 1:
        raise UsageError(
            f"{who} returned tensors of shape {shapes} for the parts of a batch: all dimensions but the first must be equal. Pad all of "
            "them to the length of the whole batch, as pad_packed_sequence does with total_length."
        )
