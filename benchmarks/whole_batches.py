"""What ``batch="whole"`` costs and saves beside one process: ``python benchmarks/whole_batches.py`` prints milliseconds and ratios.

Two gloo ranks with a thread each run the same loop as one process, in turns: a validation that adds up correct answers, a step of
training, one with mixup, which collects the rows of each batch, and one with in-batch negatives, which collects its features.
"halves, apart" are two processes that each run half of every batch and never meet: no 2 ranks can be quicker on this machine.
``overhead.py`` compares a plain step with ``DistributedDataParallel`` written by hand.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from overhead import CASES, RANKS, Case
from timing import alternated, print_ratios
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

BATCH, BATCHES = 128, 24


def validation(model: nn.Module, loader: DataLoader) -> None:
    model.eval()
    correct = 0
    with torch.no_grad():
        for x, y in loader:
            correct += (model(x).argmax(1) == y).sum().item()


def training(model: nn.Module, loader: DataLoader, change: Callable[[Any, Any], Any] = lambda x, y: (x, y)) -> None:
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in loader:
        x, y = change(x, y)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def mixup(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    order, share = torch.randperm(len(x)), 0.3
    return share * x + (1 - share) * x[order], y


def negatives(model: nn.Module, loader: DataLoader) -> None:
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, _ in loader:
        a, b = F.normalize(model(x), dim=1), F.normalize(model(x + 0.1), dim=1)
        optimizer.zero_grad()
        F.cross_entropy(a @ b.T / 0.1, torch.arange(len(x))).backward()
        optimizer.step()


LOOPS: dict[str, tuple[Callable[[nn.Module, DataLoader], None], float | None]] = {
    "validation": (validation, 0.6),
    "training": (training, None),
    "mixup": (partial(training, change=mixup), None),
    "in-batch negatives": (negatives, None),
}
"""The loops, each with the limit of its ratio."""


def seconds(run: Callable[[nn.Module, DataLoader], None], case: Case, batch: int = BATCH) -> float:
    """The seconds of a batch in the second of two passes."""
    torch.manual_seed(0)
    model = case.build()
    samples = batch * BATCHES
    data = TensorDataset(torch.randn(samples, *case.shape), torch.randint(10, (samples,)))
    for _ in range(2):
        began = time.perf_counter()
        run(model, DataLoader(data, batch))
    return (time.perf_counter() - began) / BATCHES


def rank_process(rank: int, folder: str, together: Any, repeats: int) -> None:
    """Take all turns; rank 0 prints, and runs what one process runs while rank 1 waits."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(RANKS))
    torch.set_num_threads(1)
    meetings = (Path(folder, str(number)).as_uri() for number in range(10**9))
    import parwrap

    def alone(run: Callable, case: Case) -> float:
        together.wait()
        taken = seconds(run, case) if rank == 0 else 0.0
        together.wait()
        return 1e3 * taken

    def halves(run: Callable, case: Case) -> float:
        together.wait()
        return 1e3 * seconds(run, case, BATCH // RANKS)

    def on_ranks(run: Callable, case: Case) -> float:
        os.environ["PARWRAP_INIT_METHOD"] = next(meetings)
        with contextlib.redirect_stderr(io.StringIO()), parwrap.distributed(batch="whole"):
            return 1e3 * seconds(run, case)

    for name, (run, limit) in LOOPS.items():
        ways = {"one process": alone, "2 ranks": on_ranks, "halves, apart": halves, "one process again": alone}
        taken = alternated({way: partial(measure, run, CASES["wide"]) for way, measure in ways.items()}, repeats)
        if rank == 0:
            print(f"{name}:")
            print_ratios(taken, "one process", "ms", {} if limit is None else {"2 ranks": limit})


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="passes that each way runs")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="whole-batches-") as folder:
        together = torch.multiprocessing.get_context("spawn").Barrier(RANKS)
        torch.multiprocessing.spawn(rank_process, (folder, together, arguments.repeats), RANKS)


if __name__ == "__main__":
    main()
