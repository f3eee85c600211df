"""What takes a new interpreter to measure: how long an import takes, and how long a launch until the ranks have met."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

__all__ = ["IMPORTS", "first_reductions", "import_times"]

IMPORTS = {
    "parwrap": "import parwrap",
    "all it needs": "import parwrap; parwrap.distributed",
}
"""Statements to time; the second has what the first puts off until it is used."""

PROBES = Path(__file__).parent / "probes"


def import_times(statement: str) -> tuple[float, float]:
    """The milliseconds of ``import torch`` and, after that, of ``statement``, in an interpreter of their own."""
    clock = "print((time.perf_counter() - begin) * 1e3); begin = time.perf_counter()"
    # whose turn it is to look through all that torch has made for garbage is chance
    program = f"import gc, time; begin = time.perf_counter()\nimport torch; gc.collect(); {clock}\n{statement}; {clock}"
    torch, added = _output([sys.executable, "-c", program]).split()
    return float(torch), float(added)


def first_reductions(ranks: int) -> dict[str, Callable[[], float]]:
    """For each launcher what measures the seconds until all of its ``ranks`` have done an all-reduce."""
    torchrun = [str(Path(sysconfig.get_path("scripts"), "torchrun")), "--standalone"]
    parwrap = [sys.executable, "-m", "parwrap.run"]
    by_hand, in_scope = str(PROBES / "all_reduce_by_hand.py"), str(PROBES / "all_reduce_in_scope.py")
    number = f"--nproc-per-node={ranks}"
    commands = {
        "torchrun": [*torchrun, number, by_hand],
        "parwrap.run": [*parwrap, number, in_scope],
        "parwrap.run --plain": [*parwrap, number, "--plain", by_hand],
        "torchrun again": [*torchrun, number, by_hand],
    }
    return {name: partial(_seconds_to_reduction, command, ranks) for name, command in commands.items()}


def _seconds_to_reduction(command: Sequence[str], ranks: int) -> float:
    begin = time.monotonic()
    reduced = re.findall(r"reduced at (\S+)", _output(command))
    if len(reduced) != ranks:
        raise RuntimeError(f"{' '.join(command)}: {len(reduced)} of {ranks} ranks have reported")
    return max(map(float, reduced)) - begin


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True, check=True).stdout
