"""How fast ranks start: ``python benchmarks/launch.py`` prints a table, the time of each launcher as a part of torchrun's.

Measured are the seconds from the command until every rank has imported torch and done its first all-reduce, and the seconds until the
command ends. ``torchrun --standalone`` is the reference. The launchers take turns, and a row has the median of their turns. The last row of
each table is torchrun again, which shows how much the machine varies.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

PROBE = str(Path(__file__).parent / "probes" / "all_reduce.py")

LIMITS = {2: 0.6, 4: 0.4, 8: 0.25}
"""The part of torchrun's time until the first all-reduce that a launch may take, by the number of ranks."""


class Launched(NamedTuple):
    """What one launch took.

    Attributes:
        started: seconds until all ranks have done an all-reduce.
        ended: seconds until the command has ended.
    """

    started: float
    ended: float


def commands(ranks: int) -> dict[str, list[str]]:
    """The commands that start so many ranks, by launcher."""
    torchrun = [str(Path(sysconfig.get_path("scripts"), "torchrun")), "--standalone", f"--nproc-per-node={ranks}", PROBE, "by-hand"]
    parwrap = [sys.executable, "-m", "parwrap.run", f"--nproc-per-node={ranks}"]
    return {
        "torchrun": torchrun,
        "parwrap run": [*parwrap, "--all-ranks", PROBE, "in-scope"],
        "parwrap run --plain": [*parwrap, "--plain", PROBE, "by-hand"],
        "torchrun again": torchrun,
    }


def launched(command: Sequence[str], ranks: int) -> Launched:
    """Run ``command`` once."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # users have compiled files, as torch and torchrun do
    began = time.monotonic()
    ended = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    after = time.monotonic()
    times = [float(at) for at in re.findall(r"reduced at (\S+)", ended.stdout)]
    if len(times) != ranks:
        raise RuntimeError(f"{' '.join(command)}: {len(times)} of {ranks} ranks have reported")
    return Launched(max(times) - began, after - began)


def main() -> int:
    """Measure what the command line asks for. Returns 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(LIMITS), help="how many ranks are started")
    parser.add_argument("--turns", type=int, default=5, help="turns that each launcher has")
    arguments = parser.parse_args()
    exceeded = False
    for ranks in arguments.ranks:
        each = commands(ranks)
        for command in each.values():  # so that files are in the page cache
            launched(command, ranks)
        turns = [{name: launched(command, ranks) for name, command in each.items()} for _ in range(arguments.turns)]
        reference = {part: median(getattr(turn["torchrun"], part) for turn in turns) for part in Launched._fields}
        print(f"\n{ranks} ranks, medians of {arguments.turns} turns{'':6}first all-reduce       command ended")
        for name in each:
            medians = {part: median(getattr(turn[name], part) for turn in turns) for part in Launched._fields}
            shown = "   ".join(f"{seconds:7.2f} s {seconds / reference[part]:7.2f} x" for part, seconds in medians.items())
            print(f"{name:<34} {shown}", flush=True)
            exceeded |= name.startswith("parwrap") and medians["started"] > LIMITS.get(ranks, 1.0) * reference["started"]
    return int(exceeded)


if __name__ == "__main__":
    sys.exit(main())
