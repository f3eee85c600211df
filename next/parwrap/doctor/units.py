"""Sizes and sets of ranks in readable form."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["human_size", "ranks"]


def human_size(number: float) -> str:
    """A ``number`` of bytes in readable form, such as 64 MB.

    >>> human_size(1024), human_size(64 * 2**20), human_size(1.5 * 2**30)
    ('1 KB', '64 MB', '1.5 GB')
    """
    units = ["bytes", "KB", "MB", "GB", "TB"]
    while number >= 1024 and len(units) > 1:
        number /= 1024
        del units[0]
    return f"{number:.1f}".removesuffix(".0") + f" {units[0]}"


def ranks(numbers: Iterable[int]) -> str:
    """A set of ranks in readable form, such as "ranks 0-3".

    >>> ranks([3]), ranks([0, 1, 2, 5])
    ('rank 3', 'ranks 0-2, 5')
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank {text}" if len(runs) == len(runs[0]) == 1 else f"ranks {text}"
