"""Whether the combined result of the ranks equals that of the whole data, up to floating-point noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from parwrap.system.structures import leaves, number_dtype

__all__ = ["Compared", "compared"]

NOISE = {torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""How far sums in another order may differ, relative to the largest number; a Python float may be a sum in ``float32``."""
LEAST_NOISE = 2e-6

SURE = 1e-3
"""Averaging a number that is no mean is wrong by about the square of the differences between parts; a difference of this part of it shows
that."""


class Compared(NamedTuple):
    """A comparison.

    Attributes:
        differing: the differences: where, the ranks' value, and that of the whole.
        proves: whether the parts differ enough to prove that combining them is correct in general.
    """

    differing: list[tuple[str, Any, Any]]
    proves: bool


def compared(whole: Any, shared: Any, parts: Sequence[Any]) -> Compared:
    """Compare ``shared``, combined from the results of ``parts``, with the result of the ``whole``.

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
        if one is None or other is None:
            if not _same(of_whole, actual[place]):
                differing.append((place, actual[place], of_whole))
            continue
        values = [value for part in of_parts if (value := _numbers(part.get(place))) is not None and value.shape == one.shape]
        scale = max((_largest(value) for value in (one, *values)), default=0.0)
        error = _apart(one, other) / scale if scale else _apart(one, other)
        noise = (
            0.0
            if one.dtype.kind in "biu"
            else NOISE.get(of_whole.dtype, LEAST_NOISE)
            if isinstance(of_whole, torch.Tensor)
            else LEAST_NOISE
        )
        if not error <= noise:
            differing.append((place, actual[place], of_whole))
        elif one.dtype.kind == "f" and len(values) == len(parts) > 1 and one.size:
            spread = max(_apart(value, one) for value in values) / (scale or 1.0)
            proves = proves and spread > 0 and error <= SURE * spread**2
    return Compared(differing, proves and not differing)


def _numbers(x: Any) -> np.ndarray | None:
    """``x`` as an array, or ``None``."""
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
    """The largest difference; infinite where only one is finite or shapes differ."""
    if one.shape != other.shape:
        return np.inf
    with np.errstate(invalid="ignore"):
        same = (one == other) | ((one != one) & (other != other))
        apart = np.where(same, 0.0, np.abs(np.asarray(one, dtype=np.result_type(one, np.float64)) - other))
    return float(np.where(np.isnan(apart), np.inf, apart).max()) if apart.size else 0.0


def _same(one: Any, other: Any) -> bool:
    """Whether two values that are not numbers are equal; without an equality they count as equal."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return type(one) is type(other) and np.array_equal(one, other)
    if type(one).__eq__ is object.__eq__:
        return type(one) is type(other)
    return bool(one == other)
