"""Compare noisy timings: measure in turns, take ratios of neighbours, and say how sure their median is.

What is measured, and in which unit, is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

__all__ = ["Row", "alternated", "compared", "judged"]

Measured = TypeVar("Measured")

RESAMPLES = 10_000
TOLERANCE = 0.03
"""How far an interval that contains the limit may reach from its median, each way, to count as met."""


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        case: what was measured.
        compared: what against what.
        unit: of ``reference`` and ``measured``, which are medians.
        value: what ``limit`` is for: the median paired ratio, or a median in ``unit`` of its own.
        low, high: the 95 % bootstrap interval of ``value``.
        limit: the largest ``value`` that is wanted; ``None`` for a reference against itself.
        met: whether ``value`` keeps to ``limit``.
        samples: what ``value`` is the median of.
    """

    case: str
    compared: str
    unit: str
    reference: float
    measured: float
    value: float
    low: float
    high: float
    limit: float | None
    met: bool | None
    samples: list[float]


def alternated(measures: Mapping[str, Callable[[], Measured]], pairs: int) -> dict[str, list[Measured]]:
    """Take each of ``measures`` once in every one of ``pairs`` rounds, which go through them forwards and backwards in turn."""
    taken: dict[str, list[Measured]] = {name: [] for name in measures}
    order = list(measures)
    for _ in range(pairs):
        for name in order:
            taken[name].append(measures[name]())
        order.reverse()
    return taken


def compared(case: str, unit: str, taken: Mapping[str, Sequence[float]], reference: str, limits: Mapping[str, float]) -> list[Row]:
    """A row for each of ``taken`` against ``reference``, by the ratios of what was measured in the same round."""
    return [
        judged(
            case=case,
            compared=f"{name} / {reference}",
            unit=unit,
            reference=taken[reference],
            measured=values,
            samples=[value / base for value, base in zip(values, taken[reference], strict=True)],
            limit=limits.get(name),
        )
        for name, values in taken.items()
        if name != reference
    ]


def judged(
    case: str, compared: str, unit: str, reference: Sequence[float], measured: Sequence[float], samples: list[float], limit: float | None
) -> Row:
    """The row whose value is the median of ``samples``."""
    value = float(np.median(samples))
    low, high = _interval(samples)
    return Row(
        case=case,
        compared=compared,
        unit=unit,
        reference=float(np.median(reference)),
        measured=float(np.median(measured)),
        value=value,
        low=low,
        high=high,
        limit=limit,
        met=None if limit is None else value <= limit or (low <= limit <= high and max(value - low, high - value) <= TOLERANCE * value),
        samples=samples,
    )


def _interval(samples: Sequence[float]) -> tuple[float, float]:
    """The 95 % bootstrap interval of the median."""
    resampled = np.random.default_rng(0).choice(samples, size=(RESAMPLES, len(samples)))
    low, high = np.percentile(np.median(resampled, axis=1), [2.5, 97.5])
    return float(low), float(high)
