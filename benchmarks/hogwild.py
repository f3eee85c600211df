"""How much faster Hogwild trains a sparse linear model: ``python benchmarks/hogwild.py`` prints a table and writes it as JSON.

The model and the samples are those of ``examples/hogwild.py``: 47 236 features, 76 of them in a sample. Each way trains on
one sample a step, as the paper does, with a thread for each process, and is timed from the first step of any process to the last of all:

- ``one worker``: the plain loop in one process; ``one worker again`` shows what is noise.
- ``hogwild``, ``hogwild locked``: ``@parwrap.hogwild(workers=2)``.
- ``hogwild by hand``: two processes after ``model.share_memory()``, without parwrap.
- ``apart``: two processes with a model each, which is as fast as the machine's cores allow.
- ``ddp``, ``ddp by hand``: two ranks inside ``parwrap.distributed``, and with ``DistributedDataParallel``.

All take turns. A value is the median ratio of the times of a sample in the same turn, so 0.5 is twice as fast; the limit of 0.588 is 1.7
times. The table is read as that of ``overhead.py``. It needs two cores that nothing else uses.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import runpy
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from overhead import HEADER, line
from timing import Row, alternated, compared
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import parwrap
from parwrap.inline.launching import run_on_ranks

EXAMPLE = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "hogwild.py"))

WORKERS = 2
WARM_UP = 50
SLOWER = 8
"""About how much longer DDP takes for a step; it trains so many times fewer."""

WAYS = ("one worker", "hogwild", "hogwild locked", "hogwild by hand", "apart", "ddp", "ddp by hand", "one worker again")

FASTER = 1.7
"""How much faster two workers are to be than one."""


def train(dataset: Any, batch_size: int, steps: int, wrap: Callable[[Any], Any] = lambda model: model, model: Any = None) -> float:
    """Train ``steps`` batches on each rank, each from another part of the data; returns the microseconds that a sample of all took."""
    model = wrap(EXAMPLE["Linear"]() if model is None else model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    batches = list(zip(*(tensor.split(batch_size) for tensor in dataset.tensors), strict=True))
    rank, size = parwrap.rank(), parwrap.world_size()

    def run(begin: int, end: int) -> None:
        for step in range(begin, end):
            features, values, labels = batches[(step * size + rank) % len(batches)]
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(model(features, values), labels).backward()
            optimizer.step()

    run(0, WARM_UP)
    parwrap.barrier()
    begin = time.monotonic()
    run(WARM_UP, WARM_UP + steps)
    end = time.monotonic()
    times = parwrap.gather((begin, end))
    return 1e6 * (max(end for _, end in times) - min(begin for begin, _ in times)) / (steps * size * batch_size)


def ways(dataset: Any, batch_size: int, steps: int) -> dict[str, Callable[[], float]]:
    """What takes turns: each returns the microseconds of a sample."""
    each, few = (partial(train, dataset, batch_size, steps // WORKERS // times) for times in (1, SLOWER))

    def alone() -> float:
        return run_on_ranks(lambda: train(dataset, batch_size, steps), 1)

    def by_hand() -> float:
        model = EXAMPLE["Linear"]().share_memory()
        return run_on_ranks(lambda: each(model=model), WORKERS)

    return {
        "one worker": alone,
        "hogwild": parwrap.hogwild(workers=WORKERS)(lambda: each()),
        "hogwild locked": parwrap.hogwild(workers=WORKERS, lock=True)(lambda: each()),
        "hogwild by hand": by_hand,
        "apart": lambda: run_on_ranks(lambda: each(), WORKERS),
        "ddp": lambda: run_on_ranks(parwrap.distributed(lambda: few()), WORKERS),
        "ddp by hand": lambda: run_on_ranks(lambda: few(wrap=DistributedDataParallel), WORKERS),
        "one worker again": alone,
    }


def rows(batch_size: int, pairs: int, seconds: float, only: list[str]) -> Iterator[Row]:
    """The rows of the table."""
    torch.manual_seed(0)
    dataset = EXAMPLE["samples"](20_000)
    torch.set_num_threads(1)
    with contextlib.redirect_stderr(io.StringIO()):  # the line at the start of a run is no part of the table
        step = run_on_ranks(lambda: train(dataset, batch_size, 100), 1) * batch_size
        every = ways(dataset, batch_size, max(WORKERS * SLOWER, round(1e6 * seconds / step)))
        taken = alternated({name: way for name, way in every.items() if name in only}, pairs)
    case = f"batch {batch_size}"
    yield from compared(case, "us", taken, "one worker", {"hogwild": 1 / FASTER})
    for reference in [name for name in ("ddp", "ddp by hand", "hogwild by hand") if name in taken]:
        limits = {} if reference == "hogwild by hand" else {"hogwild": 1.0}
        yield from compared(case, "us", {name: taken[name] for name in (reference, "hogwild")}, reference, limits)


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10, help="turns that each way has")
    parser.add_argument("--batch-size", type=int, default=1, help="samples per step")
    parser.add_argument("--seconds", type=float, default=2.0, help="about how long one worker trains in a turn")
    parser.add_argument("--ways", default=",".join(WAYS), help="what takes turns")
    parser.add_argument("--json", type=Path, default=Path(__file__).with_suffix(".json"), help="where the rows are written")
    arguments = parser.parse_args()
    print(HEADER)
    measured = []
    for row in rows(arguments.batch_size, arguments.pairs, arguments.seconds, ["one worker", "hogwild", *arguments.ways.split(",")]):
        print(line("hogwild", row), flush=True)
        measured.append(asdict(row))
    results = {"torch": version("torch"), "python": platform.python_version(), "cores": os.cpu_count(), "rows": measured}
    arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
