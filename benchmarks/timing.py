"""Compares noisy timings: measures take turns, and ratios are those of neighbours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median, quantiles

__all__ = ["alternated", "print_ratios"]


def alternated(measures: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Take each of ``measures`` once a round, in rounds that go through them forwards and backwards in turn."""
    taken: dict[str, list[float]] = {name: [] for name in measures}
    order = list(measures)
    for _ in range(repeats):
        for name in order:
            taken[name].append(measures[name]())
        order.reverse()
    return taken


def print_ratios(taken: Mapping[str, Sequence[float]], reference: str, unit: str, limits: Mapping[str, float] | None = None) -> None:
    """Print the median of each measure, and its median ratio to ``reference`` in the same round, with quartiles and its limit."""
    for name, values in taken.items():
        ratios = [value / base for value, base in zip(values, taken[reference], strict=True)]
        low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        limit = f"   limit {limits[name]}" if limits and name in limits else ""
        print(f"{name:24}{median(values):10.3f} {unit}{median(ratios):8.3f}   {low:.3f} to {high:.3f}{limit}", flush=True)
