"""What ``--uniform-length`` saves: ``python benchmarks/uniform_length.py`` prints a table, writes it as JSON, and draws the curves.

``examples/text.py``, a plain script, trains a transformer encoder to tell which package a function of the standard library is from, with
all samples padded to the longest. It is run as it is and with ``--uniform-length --pad-value 0``, in turns, on 1 and on 2 ranks with a
thread each, until it classifies held-out functions as well as ``TARGET``. Measured are the seconds from the first step to that accuracy,
between two evaluations in proportion, with all that the option costs: reading the lengths, sorting, and evaluation too. The curves are
drawn if matplotlib is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from timing import Row, alternated, compared

ROOT = Path(__file__).parents[1]
TARGET = 0.7
LIMIT = 0.5
"""Of the time of padding everything to the longest."""

WASTE = 0.05
"""Of all tokens, that may be padding."""

WAYS: dict[str, list[str]] = {"padded to the longest": [], "uniform_length": ["--uniform-length", "--pad-value", "0"]}


@dataclass(frozen=True)
class Run:
    """A training.

    Attributes:
        seconds: after which it was evaluated each time.
        accuracies: that were found.
        padding: the part of all tokens of the first epoch.
    """

    seconds: list[float]
    accuracies: list[float]
    padding: float

    @property
    def to_target(self) -> float:
        """The seconds until the accuracy was ``TARGET``."""
        points = [(0.0, 0.0), *zip(self.seconds, self.accuracies, strict=True)]
        (begin, low), (end, high) = points[-2:]
        return begin + (end - begin) * (TARGET - low) / (high - low)


def train(way: str, ranks: int, seed: int) -> Run:
    """Run the script to ``TARGET``.

    Raises:
        RuntimeError: it does not get there.
    """
    command = [sys.executable, "-m", "parwrap.run", f"--nproc-per-node={ranks}", "--batch=global", *WAYS[way], "examples/text.py"]
    command += [f"--until={TARGET}", f"--seed={seed}", "--epochs=15"]
    ran = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True, check=True)
    found = re.findall(r"epoch +\d+  (\S+) s  padding (\S+)  test accuracy (\S+)", ran.stdout)
    seconds, padding, accuracies = ([float(each) for each in column] for column in zip(*found, strict=True))
    if accuracies[-1] < TARGET:
        raise RuntimeError(f"{' '.join(command)}: an accuracy of {accuracies[-1]} after {len(found)} epochs")
    return Run(seconds, accuracies, padding[0])


def measure(ranks: int, repeats: int) -> tuple[Row, dict[str, list[Run]]]:
    """The row of ``ranks``, and what was run for it."""
    runs: dict[str, list[Run]] = {way: [] for way in WAYS}

    def to_target(way: str) -> float:
        runs[way].append(train(way, ranks, seed=len(runs[way])))
        return runs[way][-1].to_target

    seconds = alternated({way: partial(to_target, way) for way in WAYS}, repeats)
    reference, measured = WAYS
    (row,) = compared(f"{ranks} rank(s)", "s", seconds, reference, {measured: LIMIT})
    return row, runs


def draw(results: dict[str, dict[str, list[Run]]], path: Path) -> None:
    """Accuracy by time, a picture for each number of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(results), figsize=(5 * len(results), 3.5), sharey=True, squeeze=False)
    for axis, (case, runs) in zip(axes[0], results.items(), strict=True):
        for color, (way, repeated) in zip(("tab:gray", "tab:blue"), runs.items(), strict=True):
            for number, run in enumerate(repeated):
                axis.plot([0, *run.seconds], [0, *run.accuracies], "o-", color=color, label=None if number else way, markersize=3)
        axis.axhline(TARGET, color="black", linewidth=0.5)
        axis.set(title=case, xlabel="seconds", ylabel="held-out accuracy")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def printed(row: Row, runs: dict[str, list[Run]]) -> str:
    """The line of the table."""
    padding = " -> ".join(f"{median(run.padding for run in each):5.1%}" for each in runs.values())
    return (
        f"{row.case:10} {row.reference:6.1f} s -> {row.measured:5.1f} s   x {row.value:.3f} ({row.low:.3f} to {row.high:.3f})   "
        f"limit {row.limit}   padding {padding}, limit {WASTE:.0%}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each way, with a seed each")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks")
    parser.add_argument("--json", type=Path, default=Path(__file__).with_suffix(".json"), help="where the rows are written")
    arguments = parser.parse_args(argv)
    print(f"seconds to a held-out accuracy of {TARGET}: padded to the longest -> uniform_length")
    results, rows = {}, []
    for ranks in arguments.ranks:
        row, runs = measure(ranks, arguments.repeats)
        print(printed(row, runs), flush=True)
        results[row.case] = runs
        rows.append({**asdict(row), "runs": {way: [asdict(run) for run in each] for way, each in runs.items()}})
    measured = {"torch": version("torch"), "python": platform.python_version(), "cores": os.cpu_count(), "target": TARGET, "rows": rows}
    arguments.json.write_text(json.dumps(measured, indent=1) + "\n")
    if find_spec("matplotlib"):
        draw(results, arguments.json.with_suffix(".png"))


if __name__ == "__main__":
    main()
