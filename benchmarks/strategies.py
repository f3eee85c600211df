"""What each strategy gives and costs: ``python benchmarks/strategies.py`` prints a table.

``probes/teacher.py``, a plain script with an MLP of 4.5 million parameters and Adam, runs with each strategy in turns, with a thread for
each process and an allocator that returns large blocks. The columns are medians: samples per second of all ranks together; megabytes that
each process sends for each of its steps, as the loopback interface counts them; the peak memory of rank
0 in MiB, also with 27 million parameters; and the held-out loss at the end.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil

WAYS = {
    "1 process": (1, "--nproc-per-node 1"),
    "ddp": (2, "--nproc-per-node 2"),
    "ddp, compress bf16": (2, "--nproc-per-node 2 --compress bf16"),
    "ddp, compress powersgd": (2, "--nproc-per-node 2 --compress powersgd"),
    "zero1": (2, "--nproc-per-node 2 --strategy zero1"),
    "fsdp": (2, "--nproc-per-node 2 --strategy fsdp --wrap 1000000"),
    "local_sgd, every 8": (2, "--nproc-per-node 2 --strategy local_sgd --every 8"),
    "diloco, every 8": (2, "--nproc-per-node 2 --strategy local_sgd --every 8 --outer nesterov"),
    "parameter_server": (3, "--nproc-per-node 3 --strategy parameter_server"),
    "hogwild": (2, "--nproc-per-node 2 --strategy hogwild"),
    "data_parallel": (1, "--data-parallel cpu,cpu"),
}
"""How many processes send, and the options of ``parwrap run``."""

ENVIRON = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1000000"}
LARGE = "--width=2560"


class Run(NamedTuple):
    samples: float
    sent: float
    peak: float
    loss: float


def train(way: str, samples: int, epochs: int, *options: str) -> Run:
    """Run the script once."""
    senders, launch = WAYS[way]
    command = [sys.executable, "-m", "parwrap.run", *launch.split(), "benchmarks/probes/teacher.py"]
    command += [f"--samples={samples}", f"--epochs={epochs}", *options]
    before = _sent()
    environ = {**os.environ, **ENVIRON}
    run = subprocess.run(command, cwd=Path(__file__).parents[1], env=environ, stdout=subprocess.PIPE, text=True, check=True)
    sent = _sent() - before
    steps, seconds, loss, peak = map(float, re.findall(r"steps (\S+)  seconds (\S+)  loss (\S+)  peak (\S+) MiB", run.stdout)[-1])
    return Run(samples * epochs / seconds, sent / 1e6 / senders / steps, peak, loss)


def _sent() -> int:
    return psutil.net_io_counters(pernic=True)["lo0" if sys.platform == "darwin" else "lo"].bytes_sent


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each strategy")
    parser.add_argument("--only", nargs="+", choices=list(WAYS), default=list(WAYS), help="what to measure")
    parser.add_argument("--samples", type=int, default=8192, help="samples of an epoch")
    parser.add_argument("--epochs", type=int, default=6)
    arguments = parser.parse_args()
    runs: dict[str, list[Run]] = {way: [] for way in arguments.only}
    for _ in range(arguments.repeats):
        for way, taken in runs.items():
            taken.append(train(way, arguments.samples, arguments.epochs))
    print(f"{'strategy':24}{'samples/s':>10}{'MB sent':>10}{'MiB':>8}{'loss':>8}{'MiB, 27 million':>18}")
    for way, taken in runs.items():
        samples, sent, peak, loss = map(median, zip(*taken, strict=True))
        large = train(way, 256, 1, LARGE).peak
        print(f"{way:24}{samples:10.0f}{sent:10.2f}{peak:8.0f}{loss:8.3f}{large:18.0f}", flush=True)


if __name__ == "__main__":
    main()
