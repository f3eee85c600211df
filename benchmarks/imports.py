"""How long an import takes, in new interpreters."""

from __future__ import annotations

import os
import subprocess
import sys

__all__ = ["IMPORTS", "import_times"]

IMPORTS = {
    "parwrap": "import parwrap",
    "all it needs": "import parwrap; parwrap.distributed",
}
"""Statements to time; the second has what the first puts off until it is used."""


def import_times(statement: str) -> tuple[float, float]:
    """The milliseconds of ``import torch`` and, after that, of ``statement``, in an interpreter of their own."""
    clock = "print((time.perf_counter() - begin) * 1e3); begin = time.perf_counter()"
    # whose turn it is to look through all that torch has made for garbage is chance
    program = f"import gc, time; begin = time.perf_counter()\nimport torch; gc.collect(); {clock}\n{statement}; {clock}"
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # users have it compiled, as torch is
    printed = subprocess.run([sys.executable, "-c", program], env=environ, stdout=subprocess.PIPE, text=True, check=True).stdout
    torch, added = map(float, printed.split())
    return torch, added
