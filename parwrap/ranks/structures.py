"""Describes the structure of nested dicts, lists, tuples and dataclasses of numbers, tensors and arrays, to compare it between ranks.

A collective over them needs the same keys, lengths, shapes and dtypes on every rank, because values are matched by position. Only numbers
and tensors without a dimension may differ in type, because ``sum([])`` is an ``int`` where other ranks may have a ``float``.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Number
from typing import Any

import numpy as np
import torch

__all__ = ["Structure", "described", "difference", "leaves", "mapped", "mixed_dtypes", "number_dtype"]

MOST_NAMED = 3
"""The most differences that an error names."""

NUMBER_OF = {torch.int64: "an int", torch.float64: "a float", torch.complex128: "a complex"}
"""The name of the number type that is sent in each dtype."""
DTYPES = {what: dtype for dtype, what in NUMBER_OF.items()}
SCALAR = "a tensor [] "
"""The description of a tensor without a dimension."""

CONTAINERS = ("a dict", "a dataclass", "of length ")
"""The beginnings of descriptions of objects that are not leaves."""

Structure = dict[str, str]
"""Maps each place, an expression such as ``['loss']``, to a description of the container or leaf there."""


def _entries(x: Any) -> list[tuple[str, Any]] | None:
    """The items of ``x``, each with its expression, in an order that is the same on all ranks; ``None`` if ``x`` is a leaf."""
    if isinstance(x, dict):
        return [(f"[{key!r}]", x[key]) for key in sorted(x, key=repr)]  # ranks may have filled their dicts in different orders
    if isinstance(x, (list, tuple)):
        names = (f".{name}" for name in x._fields) if hasattr(x, "_fields") else (f"[{at}]" for at in range(len(x)))
        return list(zip(names, x, strict=True))
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return [(f".{each.name}", getattr(x, each.name)) for each in dataclasses.fields(x)]
    return None


def mapped(x: Any, leaf: Callable[[Any], Any]) -> Any:
    """``x`` with ``leaf`` applied to whatever is not a dict, list, tuple or dataclass, in an order that is the same on all ranks."""
    copied: Any
    if isinstance(x, dict):
        copied = copy.copy(x)
        for key in sorted(x, key=repr):
            copied[key] = mapped(x[key], leaf)
        return copied
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*(mapped(value, leaf) for value in x))
    if isinstance(x, list):
        copied = copy.copy(x)  # a subclass may be made from something else than a list
        copied[:] = [mapped(value, leaf) for value in x]
        return copied
    if isinstance(x, tuple):
        values = tuple(mapped(value, leaf) for value in x)
        of_ints = not isinstance(x, torch.Size) or all(isinstance(value, int) for value in values)
        return type(x)(values) if of_ints else values
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        copied = copy.copy(x)
        for each in dataclasses.fields(x):
            object.__setattr__(copied, each.name, mapped(getattr(x, each.name), leaf))
        return copied
    return leaf(x)


def leaves(x: Any) -> dict[str, Any]:
    """The leaves of ``x``, each by the expression that reaches it from ``x``.

    >>> leaves({"loss": 0.5, "hits": [1, 2]})
    {"['hits'][0]": 1, "['hits'][1]": 2, "['loss']": 0.5}
    """
    inner = _entries(x)
    if inner is None:
        return {"": x}
    return {name + place: leaf for name, value in inner for place, leaf in leaves(value).items()}


def described(x: Any) -> Structure:
    """The description of each place in ``x``.

    >>> described({"loss": 0.5, "hits": [torch.zeros(2)]})
    {'': 'a dict', "['hits']": 'of length 1', "['hits'][0]": 'a tensor [2] float32', "['loss']": 'a float'}
    """
    structure: Structure = {}

    def enter(x: Any, place: str) -> None:
        inner = _entries(x)
        if inner is None:
            structure[place] = _leaf(x)
            return
        structure[place] = "a dict" if isinstance(x, dict) else f"of length {len(x)}" if isinstance(x, (list, tuple)) else "a dataclass"
        for name, value in inner:
            enter(value, place + name)

    enter(x, "")
    return structure


def number_dtype(x: Any) -> torch.dtype | None:
    """The dtype to send a number in; ``None`` for another object, or a number that is too large."""
    if not isinstance(x, (Number, np.bool_)):
        return None
    if isinstance(x, (int, np.bool_)) or hasattr(x, "__index__"):
        return torch.int64 if -(2**63) <= int(x) < 2**63 else None
    return torch.complex128 if isinstance(x, (complex, np.complexfloating)) else torch.float64


def difference(structures: Mapping[int, Structure]) -> str:
    """The differences between the ``structures`` of the ranks, in words; empty if they can be combined.

    >>> difference({0: {"": "a dict", "['cat']": "an int"}, 1: {"": "a dict", "['dog']": "an int"}})
    "['cat'] is an int on rank 0 and missing on rank 1; ['dog'] is missing on rank 0 and an int on rank 1"
    """
    differing: dict[str, str] = {}
    for place in dict.fromkeys(place for structure in structures.values() for place in structure):
        ranks: dict[str | None, list[int]] = {}
        for rank, structure in structures.items():
            ranks.setdefault(structure.get(place), []).append(rank)
        if len(ranks) > 1 and not all(map(_is_scalar, ranks)) and not any(place.startswith(above) for above in differing):
            differing[place] = " and ".join(f"{what or 'missing'} on {_ranks(of)}" for what, of in ranks.items())
    named = [f"{place or 'it'} is {how}" for place, how in list(differing.items())[:MOST_NAMED]]
    return "; ".join([*named, *([f"and {len(differing) - MOST_NAMED} more"] if len(differing) > MOST_NAMED else [])])


def mixed_dtypes(mine: Structure, structures: Iterable[Structure]) -> list[torch.dtype | None]:
    """For each leaf of ``mine``: the dtype that can hold this leaf of all compatible ``structures``, or ``None`` if they agree.

    >>> mixed_dtypes({"": "of length 2", "[0]": "an int", "[1]": "an int"}, [{"[0]": "an int", "[1]": "a float"}])
    [None, torch.float64]
    """
    dtypes: list[torch.dtype | None] = []
    for place, what in mine.items():
        others = {what, *(structure[place] for structure in structures if place in structure)}
        if len(others) > 1:
            kinds = [DTYPES.get(each) or getattr(torch, each.removeprefix(SCALAR)) for each in others]
            real = torch.float64 if any(kind.is_floating_point for kind in kinds) else torch.int64
            dtypes.append(torch.complex128 if any(kind.is_complex for kind in kinds) else real)
        elif not what.startswith(CONTAINERS):
            dtypes.append(None)
    return dtypes


def _is_scalar(what: str | None) -> bool:
    return what is not None and (what in DTYPES or what.startswith(SCALAR))


def _leaf(x: Any) -> str:
    """A description of ``x`` in words."""
    if isinstance(x, torch.Tensor):
        return f"a tensor {list(x.shape)} {str(x.dtype).removeprefix('torch.')}"
    if isinstance(x, np.ndarray):
        return f"an array {list(x.shape)} {x.dtype}"
    dtype = number_dtype(x)
    return NUMBER_OF[dtype] if dtype else f"of type {type(x).__name__}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
