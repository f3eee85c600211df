"""Merges the results of all ranks' parts into one, of the type that a single process would have returned, and compares it with the whole.

Numbers are summed in Python and tensors in float64, in the order of ranks, so every rank has exactly the same result.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from itertools import accumulate
from numbers import Number
from os import PathLike
from typing import Any, NamedTuple

import numpy as np
import torch

from parwrap.data.evaluation_shares import Reading
from parwrap.errors import UsageError, shortened
from parwrap.places import warn
from parwrap.ranks.structures import leaves, number_dtype

__all__ = ["REDUCTIONS", "Compared", "Part", "compared", "merged"]

REDUCTIONS = {
    "mean": "weighted by the samples that each rank has read",
    "sum": "over the ranks",
    "gather": "tensors, arrays and lists in the order of one process",
}

CONSTANT = (str, bytes, bool, np.bool_, Enum, type, type(None), torch.dtype, torch.device, PathLike)

NOISE: dict[Any, float] = {torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""How far two sums of the same numbers in different order may differ, for each dtype, relative to the largest number.

``LEAST_NOISE`` is for all other dtypes, because a Python float may be a sum in ``float32``.
"""
LEAST_NOISE = 2e-6

SURE = 1e-3
"""If a result is not a mean, its average over parts is wrong by about the square of the differences between parts. An error below this
fraction of the square proves the average right."""


class Part(NamedTuple):
    """The result of one rank, and the passes over loaders that it was computed from."""

    result: Any
    passes: list[Reading]


def merged(reduce: Any, parts: list[Part]) -> Any:
    """Merge the results of ``parts``.

    Args:
        reduce: ``"mean"``, ``"sum"``, ``"gather"``, a function of the list of results; or a dict or tuple of these, one for each entry of a
            result.
        parts: the result of each rank that has a part, in the order of ranks.

    Raises:
        UsageError: the results cannot be merged by ``reduce``.

    >>> one, other = Reading("eval.py:9", sizes=[2, 2]), Reading("eval.py:9", sizes=[2])
    >>> parts = [Part({"loss": 1.0}, [one]), Part({"loss": 4.0}, [other])]
    >>> merged("mean", parts), merged("sum", parts)
    ({'loss': 2.0}, {'loss': 5.0})
    """
    return _Merge(parts).apply(reduce, [part.result for part in parts], "the result")


def _fits(reduce: Any, result: Any) -> bool:
    """Whether ``reduce`` has a reduction for each entry of ``result``."""
    if isinstance(reduce, Mapping):
        return isinstance(result, dict) and result.keys() == reduce.keys()
    return isinstance(result, (tuple, list)) and len(result) == len(reduce)


class _Merge:
    def __init__(self, parts: list[Part]) -> None:
        self._passes = list(zip(*(part.passes for part in parts), strict=True))

    def apply(self, reduce: Any, results: list[Any], name: str) -> Any:
        if callable(reduce):
            return reduce(results)
        if isinstance(reduce, (Mapping, tuple, list)):
            return self._by_name(reduce, results, name)
        if len(results) == 1:
            return results[0]
        return self._of_each(reduce, results, name)

    def _by_name(self, reduce: Any, results: list[Any], name: str) -> Any:
        for each in results:
            if not _fits(reduce, each):
                raise UsageError(
                    f"reduce={reduce!r} does not match {name}, {shortened(repr(each), 80)}: pass one reduction for each of its entries, "
                    "or one for all."
                )
        first = results[0]
        if isinstance(first, dict):
            return {key: self.apply(reduce[key], [each[key] for each in results], f"{name}[{key!r}]") for key in first}
        entries = (self.apply(each, list(of), f"{name}[{at}]") for at, (each, *of) in enumerate(zip(reduce, *results, strict=True)))
        return _made_like(first, entries)

    def _of_each(self, kind: str, results: list[Any], name: str) -> Any:
        first = results[0]
        if isinstance(first, CONSTANT):
            return _same(kind, results, name)
        if all(isinstance(each, Number) for each in results):
            return self._number(kind, results, name)
        if kind != "gather":
            results = _with_arrays(results)
            first = results[0]
        if any(type(each) is not type(first) for each in results):
            raise _differ(kind, name, "has a different type", [type(each).__name__ for each in results])
        if isinstance(first, dict):
            return self._dict(kind, results, name)
        if dataclasses.is_dataclass(first):
            return self._dataclass(kind, results, name)
        if kind == "gather" and isinstance(first, (list, torch.Tensor, np.ndarray)):
            return self._gathered(results, name)
        if isinstance(first, (tuple, list)):
            if len({len(each) for each in results}) > 1:
                raise _differ(kind, name, "has a different length", map(len, results), " For predictions, use reduce='gather'.")
            if kind == "mean" and isinstance(first, list):
                self._warn_of_rows(len(first), name)
            return _made_like(first, (self._of_each(kind, list(of), f"{name}[{at}]") for at, of in enumerate(zip(*results, strict=True))))
        if isinstance(first, (torch.Tensor, np.ndarray)):
            return self._array(kind, results, name)
        raise UsageError(
            f"evaluate(reduce={kind!r}): {name} is a {type(first).__name__}, which cannot be merged: return numbers, tensors, arrays, or "
            "dicts, lists and tuples of them, or pass a function as reduce."
        )

    def _dict(self, kind: str, results: list[dict], name: str) -> dict:
        keys = dict.fromkeys(key for each in results for key in each)
        lacking = ((rank, key) for rank, each in enumerate(results) for key in keys if key not in each)
        if kind == "mean" and (found := next(lacking, None)) is not None:
            raise UsageError(
                f"evaluate(reduce='mean'): {name} has the key {found[1]!r} on some ranks, but not on rank {found[0]}: use reduce='sum', or "
                "return the same keys on all ranks."
            )
        of = copy.copy(results[0])
        for key in keys:
            of[key] = self._of_each(kind, [each[key] for each in results if key in each], f"{name}[{key!r}]")
        return of

    def _dataclass(self, kind: str, results: list[Any], name: str) -> Any:
        of = copy.copy(results[0])
        for each in dataclasses.fields(of):
            value = self._of_each(kind, [getattr(result, each.name) for result in results], f"{name}.{each.name}")
            object.__setattr__(of, each.name, value)
        return of

    def _number(self, kind: str, results: list[Any], name: str) -> Any:
        inexact = next((each for each in results if not isinstance(each, (int, np.integer))), None)
        if kind == "gather":
            fits = "'sum'" if inexact is None else "'sum' or 'mean'"
            raise UsageError(
                f"evaluate(reduce='gather'): {name} is the number {results[0]!r}, but 'gather' joins lists or tensors. Return one of "
                f"these, or use {fits} for it, for example reduce={{'predictions': 'gather', 'correct': 'sum'}}."
            )
        if inexact is None:
            if kind == "mean":
                raise _no_mean(name)
            return _type_of_sum(results)(sum(int(each) for each in results))
        return _type_of_sum(results)(self._mean(results) if kind == "mean" else _sum(results))

    def _array(self, kind: str, results: list[Any], name: str) -> Any:
        if len({tuple(each.shape) for each in results}) > 1:
            raise _differ(
                kind, name, "has a different shape", [list(each.shape) for each in results], " For predictions, use reduce='gather'."
            )
        if isinstance(results[0], np.ndarray):
            tensors = [torch.from_numpy(np.ascontiguousarray(each).reshape(each.shape)) for each in results]
            return self._array(kind, tensors, name).numpy().astype(np.result_type(*results))
        dtype = functools.reduce(torch.promote_types, [each.dtype for each in results])
        results = [each.to(dtype) for each in results]
        first = results[0]
        if first.dtype == torch.bool:
            raise UsageError(
                f"evaluate(reduce={kind!r}): {name} is a tensor of bools, which have no {kind}: return a count, such as `mask.sum()`, or "
                "pass a function as reduce."
            )
        if not (first.is_floating_point() or first.is_complex()):
            if kind == "mean":
                raise _no_mean(name)
            return torch.stack(results).sum(0, dtype=torch.int64).to(first.dtype)
        wide = [each.to(torch.complex128 if each.is_complex() else torch.float64) for each in results]
        if kind == "mean":
            if all(torch.equal(each, wide[0]) for each in wide):
                return first
            self._warn_of_rows(len(first) if first.dim() else 1, name)
            weights = self._weights()
            weighted = torch.stack([each * weight for each, weight in zip(wide, weights, strict=True)])
            return (weighted.sum(0) / sum(weights)).to(first.dtype)
        return torch.stack(wide).sum(0).to(first.dtype)

    def _warn_of_rows(self, rows: int, name: str) -> None:
        """Warn if a result has one row for each sample of a rank, such as predictions, because rows of different samples are averaged."""
        if rows > 1 and any(len(passed) > 1 and all(sum(each.sizes) == rows for each in passed) for passed in self._passes):
            warn(
                f"parwrap: evaluate(reduce='mean'): each rank read {rows} samples, and {name} has {rows} entries, which are averaged "
                "over the ranks. If an entry belongs to one sample, as predictions do, use reduce='gather'."
            )

    def _mean(self, results: list[Any]) -> Any:
        weights = self._weights()
        if all(each == results[0] for each in results):
            return results[0]
        return _sum(each * weight for each, weight in zip(results, weights, strict=True)) / sum(weights)

    def _weights(self) -> list[int]:
        """The number of samples that each rank has read in the first pass. All passes must have the same proportions."""
        weights: list[int] = []
        for passed in self._passes:
            counts = [sum(each.sizes) for each in passed]
            weights = weights or counts
            if not _proportional(counts, weights):
                raise UsageError(
                    "evaluate(reduce='mean'): the function reads several loaders, and the ranks' parts of them have different proportions "
                    f"({weights} and {counts} samples). So it is unclear how to weight the result: decorate one function per loader, or "
                    "use reduce='sum'."
                )
            if any(each.rows for each in passed) and not _proportional([each.rows for each in passed], counts):
                raise UsageError(
                    "evaluate(reduce='mean'): a loader with batch_size=None yields items of different sizes, and it is unknown whether "
                    "an item is a sample or a batch: use reduce='sum'."
                )
        return weights

    def _gathered(self, results: list[Any], name: str) -> Any:
        first = results[0]
        if isinstance(first, list):
            together = [item for each in results for item in each]
            order = self._order([len(each) for each in results], name)
            return _made_like(first, together if order is None else (together[at] for at in order))
        if any(each.ndim == 0 for each in results) or len({tuple(each.shape[1:]) for each in results}) > 1:
            raise UsageError(
                f"evaluate(reduce='gather'): {name} has shapes that cannot be concatenated along the first dimension: "
                f"{', '.join(str(list(each.shape)) for each in results)}. Pass a function as reduce that pads them or makes a list."
            )
        order = self._order([len(each) for each in results], name)
        all_rows = torch.cat(results) if isinstance(first, torch.Tensor) else np.concatenate(results)
        return all_rows if order is None else all_rows[order]

    def _order(self, rows: list[int], name: str) -> list[int] | None:
        """The rows in the order of one process, by their number in the ranks' concatenated results; ``None`` if that order is the same."""
        for passed in self._passes:
            by_sample = rows == [sum(each.sizes) for each in passed]
            if by_sample or rows == [len(each.sizes) for each in passed]:
                if not passed[0].in_turn:
                    return None
                return _in_turn([each.sizes if by_sample else [1] * len(each.sizes) for each in passed])
        if len(self._passes) == 1 and not self._passes[0][0].in_turn:
            counts = [sum(each.sizes) for each in self._passes[0]]
            if not _proportional(rows, counts) and set(rows) == {sum(counts)}:
                raise UsageError(
                    f"evaluate(reduce='gather'): {name} has {rows[0]} rows on each rank, as many as there are samples on all ranks "
                    "together. This result seems to be allocated for all the data, of which each rank fills only a part: append to a list "
                    "instead."
                )
            return None
        what = "a stream" if len(self._passes) == 1 else "several loaders"
        raise UsageError(
            f"evaluate(reduce='gather') cannot put the rows of {name} into the order of one process: the function reads {what}, and the "
            f"ranks have {', '.join(map(str, rows))} rows, which is neither one for each sample nor one for each batch. Return one row for "
            "each sample of one loader, or pass a function as reduce."
        )


def _in_turn(sizes: list[list[int]]) -> list[int]:
    """The positions of rows in the ranks' concatenated results, in the order of one process, for batches that were dealt out in turn.

    >>> _in_turn([[2, 1], [2]])
    [0, 1, 3, 4, 2]
    """
    starts = [list(accumulate(each, initial=0)) for each in sizes]
    offsets = list(accumulate((each[-1] for each in starts), initial=0))
    return [
        offsets[rank] + row
        for turn in range(max(map(len, sizes)))
        for rank, each in enumerate(sizes)
        if turn < len(each)
        for row in range(starts[rank][turn], starts[rank][turn + 1])
    ]


def _type_of_sum(numbers: list[Any]) -> Any:
    """The type that the sum of ``numbers`` has in one process, which adds them up: a part without a match is often a plain 0.

    >>> _type_of_sum([0, np.int64(3)]), _type_of_sum([2, 0.5])
    (<class 'numpy.int64'>, <class 'float'>)
    """
    return type(functools.reduce(operator.add, [type(each)(0) for each in numbers]))


def _with_arrays(results: list[Any]) -> list[Any]:
    """``results``; if one is a tensor or an array, numbers become one too, as in a sum of both.

    >>> _with_arrays([0, torch.tensor([2, 3])])
    [tensor([0, 0]), tensor([2, 3])]
    """
    array = next((each for each in results if isinstance(each, (torch.Tensor, np.ndarray))), None)
    if array is None:
        return results
    return [_full_like(array, each) if isinstance(each, Number) else each for each in results]


def _full_like(array: torch.Tensor | np.ndarray, number: Any) -> torch.Tensor | np.ndarray:
    if isinstance(array, np.ndarray):
        return np.full(array.shape, number, np.result_type(array, number))
    number = number.item() if isinstance(number, np.generic) else number
    return torch.full_like(array, number, dtype=torch.result_type(array, number))


def _same(kind: str, results: list[Any], name: str) -> Any:
    if any(each != results[0] for each in results):
        kept = f" A {type(results[0]).__name__} is kept only if all ranks return the same one"
        then = f"{kept}: return a number or a tensor, or pass a function as reduce."
        raise _differ(kind, name, "has a different value", (shortened(repr(each), 80) for each in results), then)
    return results[0]


def _differ(kind: str, name: str, how: str, values: Iterable[Any], then: str = "") -> UsageError:
    texts = [str(each) for each in values]
    other = next((each for each in texts if each != texts[0]), texts[-1])
    return UsageError(f"evaluate(reduce={kind!r}): {name} {how} on some ranks: {texts[0]} on one and {other} on another.{then}")


def _no_mean(name: str) -> UsageError:
    return UsageError(
        f"evaluate(reduce='mean'): {name} is an integer, and the mean of the ranks' counts is not the count of a single process: use "
        "reduce='sum' for it, for example reduce={'loss': 'mean', 'correct': 'sum'}."
    )


def _sum(numbers: Iterable[Any]) -> Any:
    values = list(numbers)
    if all(isinstance(each, (int, float, np.floating, np.integer)) for each in values) and all(math.isfinite(each) for each in values):
        return math.fsum(values)
    return sum(values)


def _proportional(some: list[int], others: list[int]) -> bool:
    return all(one * sum(others) == other * sum(some) for one, other in zip(some, others, strict=True))


def _made_like(first: Any, entries: Iterable[Any]) -> Any:
    return type(first)(*entries) if hasattr(first, "_fields") else type(first)(entries)


class Compared(NamedTuple):
    """How the result merged from the ranks' parts compares with the result of all the data.

    Attributes:
        differing: the differences: the place, the merged value and the value of all the data.
        proves: whether this comparison shows that combining is correct: nothing differs, and for each float the parts differ enough
            (integers and texts need no such evidence).
    """

    differing: list[tuple[str, Any, Any]]
    proves: bool


def compared(whole: Any, shared: Any, parts: Sequence[Any]) -> Compared:
    """Compare ``shared``, combined from the results ``parts``, with ``whole``, the result of all the data.

    >>> compared({"rmse": 3.0}, {"rmse": 2.0}, [{"rmse": 1.0}, {"rmse": 3.0}]).differing
    [("['rmse']", 2.0, 3.0)]
    >>> compared(2.0, 2.0, [1.0, 3.0]).proves, compared(2.0, 2.0, [2.0, 2.0]).proves
    (True, False)
    """
    expected, actual, of_parts = leaves(whole), leaves(shared), [leaves(part) for part in parts]
    if expected.keys() != actual.keys():
        return Compared([("", shared, whole)], False)
    differing: list[tuple[str, Any, Any]] = []
    proves = True
    for place, of_whole in expected.items():
        one, other = _numbers(of_whole), _numbers(actual[place])
        if any(isinstance(of_whole, kind) != isinstance(actual[place], kind) for kind in (torch.Tensor, np.ndarray)):
            differing.append((place, actual[place], of_whole))
            continue
        if one is None or other is None:
            if not _equal(of_whole, actual[place]):
                differing.append((place, actual[place], of_whole))
            continue
        values = [value for part in of_parts if (value := _numbers(part.get(place))) is not None and value.shape == one.shape]
        scale = max((_largest(value) for value in (one, *values)), default=0.0)
        error = _apart(one, other) / scale if scale else _apart(one, other)
        noise = 0.0 if one.dtype.kind in "biu" else NOISE.get(getattr(of_whole, "dtype", None), LEAST_NOISE)
        if not error <= noise:
            differing.append((place, actual[place], of_whole))
        elif one.dtype.kind == "f" and len(values) == len(parts) > 1 and one.size:
            spread = max(_apart(value, one) for value in values) / (scale or 1.0)
            proves = proves and spread > 0 and error <= SURE * spread**2
    return Compared(differing, proves and not differing)


def _numbers(x: Any) -> np.ndarray | None:
    """``x`` as an array; ``None`` if it is not numeric."""
    if isinstance(x, torch.Tensor):
        x = x.detach().cpu()
        return (x.double() if x.is_floating_point() else x).numpy()
    if isinstance(x, np.ndarray):
        return x if x.dtype.kind in "biufc" else None
    return None if isinstance(x, bool) or number_dtype(x) is None else np.asarray(x)


def _largest(x: np.ndarray) -> float:
    finite = np.abs(x[np.isfinite(x)])
    return float(finite.max()) if finite.size else 0.0


def _apart(one: np.ndarray, other: np.ndarray) -> float:
    """The largest difference between entries of two arrays; infinite if only one of two entries is finite, or if shapes differ."""
    if one.shape != other.shape:
        return np.inf
    with np.errstate(invalid="ignore"):
        same = (one == other) | ((one != one) & (other != other))
        apart = np.where(same, 0.0, np.abs(np.asarray(one, dtype=np.result_type(one, np.float64)) - other))
    return float(np.where(np.isnan(apart), np.inf, apart).max()) if apart.size else 0.0


def _equal(one: Any, other: Any) -> bool:
    """Whether two values that are not numbers are equal. Objects whose type defines no ``==`` are equal if they have the same type."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return type(one) is type(other) and np.array_equal(one, other)
    if type(one).__eq__ is object.__eq__:
        return type(one) is type(other)
    return bool(one == other)
