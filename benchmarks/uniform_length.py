"""What ``--uniform-length`` saves: ``python benchmarks/uniform_length.py`` prints the seconds to a held-out accuracy of 0.7.

``examples/text.py`` pads all samples to the longest. It runs as it is and with ``--uniform-length --pad-value 0``, in turns, with a thread
for each rank. The seconds are those from the first step, between two evaluations in proportion, with all that the option costs: reading the
lengths, sorting, and evaluation too.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

from timing import alternated, print_ratios

TARGET = 0.7
WAYS: dict[str, list[str]] = {"padded to the longest": [], "uniform length": ["--uniform-length", "--pad-value", "0"]}
LIMITS = {"uniform length": 0.5}


def seconds_to_target(way: str, ranks: int, seeds: Counter[str]) -> float:
    """Run the script until it is as good as ``TARGET``."""
    command = [sys.executable, "-m", "parwrap.run", f"--nproc-per-node={ranks}", "--batch=global", *WAYS[way], "examples/text.py"]
    command += [f"--until={TARGET}", f"--seed={seeds[way]}", "--epochs=15"]
    seeds[way] += 1
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=Path(__file__).parents[1], env=environ, stdout=subprocess.PIPE, text=True, check=True)
    found = re.findall(r"epoch +\d+  (\S+) s  padding (\S+)  test accuracy (\S+)", run.stdout)
    points = [(0.0, 0.0), *((float(seconds), float(accuracy)) for seconds, _, accuracy in found)]
    (begin, low), (end, high) = points[-2:]
    if high < TARGET:
        raise RuntimeError(f"{' '.join(command)}: an accuracy of {high} after {len(found)} epochs")
    print(f"  {way}: padding {float(found[0][1]):.1%}, {len(found)} epochs", flush=True)
    return begin + (end - begin) * (TARGET - low) / (high - low)


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each way, with a seed each")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks")
    arguments = parser.parse_args()
    for ranks in arguments.ranks:
        print(f"{ranks} rank(s)")
        seeds: Counter[str] = Counter()
        taken = alternated({way: partial(seconds_to_target, way, ranks, seeds) for way in WAYS}, arguments.repeats)
        print_ratios(taken, next(iter(WAYS)), "s", LIMITS)


if __name__ == "__main__":
    main()
