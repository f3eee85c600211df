"""What each way to train in parallel gives and costs: ``python benchmarks/strategies.py`` prints a table and writes it as JSON.

``probes/teacher.py``, a plain script with an MLP of 4.5 million parameters and Adam, is run in every way in turns, each process with one
thread, and with an allocator that gives large blocks back when they are freed. The columns, medians over the repeats, are:

- ``samples/s``: of all ranks together, of training alone.
- ``MB sent``: by each process for each of its steps, as the loopback interface counts it; nothing else may use that meanwhile.
- ``MiB peak``: of the memory of rank 0's process; in a second table with 27 million parameters, where it shows what is in shards.
- ``loss``: on held-out data, when as much time has passed as the fastest way takes for all; between two evaluations in proportion.
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
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from timing import alternated

ROOT = Path(__file__).parents[1]
SAMPLES, EPOCHS = 8192, 6
LARGE, IN_SHARDS = 2560, ("ddp", "zero1", "fsdp")
"""The width of the larger model, and the ways that are compared with it."""

ENVIRON = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1000000"}
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


@dataclass(frozen=True)
class Way:
    """A way to train: the options of ``parwrap.run``, and how many of its processes send."""

    options: str
    sends: int = 2


WAYS = {
    "1 process": Way("--nproc-per-node 1", sends=1),
    "ddp": Way("--nproc-per-node 2"),
    "ddp, compress bf16": Way("--nproc-per-node 2 --compress bf16"),
    "ddp, compress powersgd": Way("--nproc-per-node 2 --compress powersgd"),
    "zero1": Way("--nproc-per-node 2 --strategy zero1"),
    "fsdp": Way("--nproc-per-node 2 --strategy fsdp --wrap 1000000"),
    "local_sgd, every 8": Way("--nproc-per-node 2 --strategy local_sgd --every 8"),
    "diloco, every 8": Way("--nproc-per-node 2 --strategy local_sgd --every 8 --outer nesterov"),
    "parameter_server": Way("--nproc-per-node 3 --strategy parameter_server", sends=3),
    "hogwild": Way("--nproc-per-node 2 --strategy hogwild"),
    "data_parallel": Way("--data-parallel cpu,cpu", sends=1),
    "none": Way("--nproc-per-node 2 --strategy none"),
}


@dataclass(frozen=True)
class Run:
    """A training.

    Attributes:
        seconds: after which it was evaluated each time.
        losses: that were found.
        samples: trained on in a second.
        sent: megabytes, by each process in a step.
        peak: of memory, in MiB.
    """

    seconds: list[float]
    losses: list[float]
    samples: float
    sent: float
    peak: float

    def loss_at(self, seconds: float) -> float:
        """The loss after so many seconds."""
        return float(np.interp(seconds, self.seconds, self.losses))


def train(way: Way, samples: int, epochs: int, *options: str) -> Run:
    """Run the script once."""
    command = [sys.executable, "-m", "parwrap.run", *way.options.split(), "benchmarks/probes/teacher.py"]
    command += [f"--samples={samples}", f"--epochs={epochs}", *options]
    before = psutil.net_io_counters(pernic=True)[LOOPBACK].bytes_sent
    ran = subprocess.run(command, cwd=ROOT, env={**os.environ, **ENVIRON}, stdout=subprocess.PIPE, text=True, check=True)
    sent = psutil.net_io_counters(pernic=True)[LOOPBACK].bytes_sent - before
    found = re.findall(r"steps (\S+)  seconds (\S+)  loss (\S+)  peak (\S+) MiB", ran.stdout)
    steps, seconds, losses, peaks = ([float(each) for each in column] for column in zip(*found, strict=True))
    return Run(seconds, losses, samples * epochs / seconds[-1], sent / 1e6 / way.sends / steps[-1], peaks[-1])


def measure(names: Sequence[str], repeats: int, samples: int, epochs: int) -> dict[str, list[Run]]:
    """The runs of each way."""
    runs: dict[str, list[Run]] = {name: [] for name in names}

    def run(name: str) -> float:
        runs[name].append(train(WAYS[name], samples, epochs))
        print(".", end="", flush=True)
        return runs[name][-1].samples

    alternated({name: partial(run, name) for name in names}, repeats)
    print()
    return runs


def rows(runs: dict[str, list[Run]]) -> list[dict[str, float | str]]:
    """A line for each way, of medians; every run has the losses of equal time with the others of its round."""
    rounds = [min(run.seconds[-1] for run in of_all) for of_all in zip(*runs.values(), strict=True)]
    return [
        {
            "way": name,
            "samples/s": float(np.median([run.samples for run in each])),
            "MB sent": float(np.median([run.sent for run in each])),
            "MiB peak": float(np.median([run.peak for run in each])),
            "loss": float(np.median([run.loss_at(seconds) for run, seconds in zip(each, rounds, strict=True)])),
        }
        for name, each in runs.items()
    ]


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each way")
    parser.add_argument("--only", nargs="+", choices=list(WAYS), default=list(WAYS), help="the ways to measure")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of an epoch")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--json", type=Path, default=Path(__file__).with_suffix(".json"), help="where the rows are written")
    arguments = parser.parse_args()
    runs = measure(arguments.only, arguments.repeats, arguments.samples, arguments.epochs)
    table = rows(runs)
    print(f"{'way':24} {'samples/s':>10} {'MB sent':>10} {'MiB peak':>10} {'loss':>8}")
    for row in table:
        print(f"{row['way']:24} {row['samples/s']:10.0f} {row['MB sent']:10.2f} {row['MiB peak']:10.0f} {row['loss']:8.4f}")
    peaks = {name: train(WAYS[name], 256, 1, f"--width={LARGE}").peak for name in IN_SHARDS if name in arguments.only}
    for name, peak in peaks.items():
        print(f"{name:24} {peak:10.0f} MiB peak with 27 million parameters")
    measured: dict[str, Any] = {
        "torch": version("torch"),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "rows": table,
        "large": peaks,
    }
    measured["runs"] = {name: [asdict(run) for run in each] for name, each in runs.items()}
    arguments.json.write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
