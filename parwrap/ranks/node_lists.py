"""Expands SLURM's short forms: ``node[01-03,7],gpu1`` into host names, ``2(x3),1`` into numbers.

It does the same as ``scontrol show hostnames``, without running it. ``launchers.py`` uses it.
"""

from __future__ import annotations

import itertools
import math
import re

from parwrap.errors import LaunchError

__all__ = ["expanded_counts", "expanded_hosts"]

MOST = 65536
"""The largest range, and the most nodes, that SLURM itself accepts."""


def expanded_hosts(text: str) -> list[str]:
    """The hosts of a node list, in its order.

    Args:
        text: names with ranges in brackets, separated by commas or spaces.

    Raises:
        LaunchError: ``text`` is not a node list, or names too many hosts.

    >>> expanded_hosts("node[01-03,7],gpu1")
    ['node01', 'node02', 'node03', 'node7', 'gpu1']
    >>> expanded_hosts("a[1-2]b[3-4]")
    ['a1b3', 'a1b4', 'a2b3', 'a2b4']
    """
    hosts: list[str] = []
    for match in re.finditer(r"(?:[^\[\],\s]+|\[[^\[\]]*\])+|(\[|\])", text):
        if match[1]:
            raise _unreadable("node list", text, f"has an unmatched {match[1]}")
        found = re.findall(r"\[([^\]]*)\]|([^\[]+)", match[0])
        parts = [[name] if name else _numbers(ranges, text) for ranges, name in found]
        if len(hosts) + math.prod(map(len, parts)) > MOST:
            raise _unreadable("node list", text, f"names more than {MOST} hosts")
        hosts += map("".join, itertools.product(*parts))
    return hosts


def expanded_counts(text: str) -> list[int]:
    """The numbers of a list in which ``(x3)`` means that the number before it occurs three times.

    Raises:
        LaunchError: ``text`` is not such a list, or covers too many nodes.

    >>> expanded_counts("2(x3),1")
    [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", part.strip())
        if match is None:
            raise _unreadable("list of tasks per node", text, f"has {part!r}, which is not a number like 2 or 2(x3)")
        times = int(match[2] or 1)
        if len(counts) + times > MOST:
            raise _unreadable("list of tasks per node", text, f"covers more than {MOST} nodes")
        counts += [int(match[1])] * times
    return counts


def _numbers(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,18})(?:-([0-9]{1,18}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or last < first:
            raise _unreadable("node list", text, f"has [{part}], which is not a range like [1-4]")
        if len(numbers) + last - first >= MOST:
            raise _unreadable("node list", text, f"names more than {MOST} hosts")
        numbers += [str(number).zfill(len(match[1])) for number in range(first, last + 1)]
    return numbers


def _unreadable(what: str, text: str, why: str) -> LaunchError:
    shown = text if len(text) <= 80 else f"{text[:80]}..."
    remedy = "correct SLURM_STEP_TASKS_PER_NODE, or unset it"
    if what == "node list":
        remedy = "parwrap does not need it if you set MASTER_ADDR and MASTER_PORT"
    return LaunchError(f"cannot parse the {what} {shown!r}: it {why}. SLURM sets this list: {remedy}.")
