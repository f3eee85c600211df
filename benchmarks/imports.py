"""How long ``import parwrap`` takes beside torch: ``python benchmarks/imports.py`` prints medians of new interpreters, in turns."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from functools import partial
from statistics import median

from timing import alternated

IMPORTS = {"import parwrap": "import parwrap", "parwrap.distributed": "import parwrap; parwrap.distributed", "nothing": "pass"}
"""The second also imports what the first puts off until it is used."""

LIMIT = 30.0
"""Milliseconds."""


def import_time(statement: str) -> float:
    """The milliseconds of ``statement`` in a new interpreter that has imported torch."""
    program = f"import gc, time, torch; gc.collect(); begin = time.perf_counter()\n{statement}\nprint((time.perf_counter() - begin) * 1e3)"
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}  # users have compiled files
    environ["OMP_NUM_THREADS"] = "1"
    return float(subprocess.run([sys.executable, "-c", program], env=environ, stdout=subprocess.PIPE, text=True, check=True).stdout)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=10, help="interpreters for each statement")
    arguments = parser.parse_args()
    for statement in IMPORTS.values():
        import_time(statement)  # compiles
    for name, times in alternated({name: partial(import_time, each) for name, each in IMPORTS.items()}, arguments.repeats).items():
        print(f"{name:24}{median(times):8.1f} ms   {min(times):.1f} to {max(times):.1f}   limit {LIMIT:.0f}")


if __name__ == "__main__":
    main()
