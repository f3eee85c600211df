"""How much faster Hogwild trains a sparse linear model: ``python benchmarks/hogwild.py`` prints microseconds of a sample, and ratios.

The model and the samples are those of ``examples/hogwild.py``. Each way trains on one sample a step, as the paper does, with a thread for
each process, and is timed from the first step of any process to the last of all. "by hand" is two processes after
``model.share_memory()``, without parwrap; "apart" is two processes with a model each, which is what the cores allow. It needs two cores
that nothing else uses.
"""

from __future__ import annotations

import argparse
import runpy
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timing import alternated, print_ratios
from torch import multiprocessing
from torch.nn import functional as F

import parwrap

EXAMPLE = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "hogwild.py"))
WORKERS, WARM_UP = 2, 50
LIMITS = {"hogwild": round(1 / 1.7, 3)}
"""1.7 times as fast as one worker."""

Span = tuple[float, float]


def train(model: Any, samples: Any, steps: int, rank: int, size: int, meet: Callable[[], Any]) -> Span:
    """Train ``steps`` steps after a warm-up; returns when they began and ended."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    batches = list(zip(*(tensor.split(1) for tensor in samples.tensors), strict=True))

    def run(begin: int, end: int) -> None:
        for step in range(begin, end):
            features, values, labels = batches[(step * size + rank) % len(batches)]
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(model(features, values), labels).backward()
            optimizer.step()

    run(0, WARM_UP)
    meet()
    begin = time.monotonic()
    run(WARM_UP, WARM_UP + steps)
    return begin, time.monotonic()


def one_worker(samples: Any, steps: int) -> list[Span]:
    return [train(EXAMPLE["Linear"](), samples, steps, 0, 1, lambda: None)]


def hogwild(samples: Any, steps: int, lock: bool = False) -> list[Span]:
    @parwrap.hogwild(workers=WORKERS, lock=lock)
    def trained(model: Any) -> list[Span]:
        span = train(model, samples, steps // WORKERS, parwrap.rank(), WORKERS, parwrap.barrier)
        return parwrap.gather(span)

    return trained(EXAMPLE["Linear"]())


def by_hand(samples: Any, steps: int, shared: bool = True) -> list[Span]:
    context: Any = multiprocessing.get_context("fork")
    barrier, spans, model = context.Barrier(WORKERS), context.SimpleQueue(), EXAMPLE["Linear"]()
    if shared:
        model.share_memory()

    def work(rank: int) -> None:
        spans.put(train(model, samples, steps // WORKERS, rank, WORKERS, barrier.wait))

    processes = [context.Process(target=work, args=(rank,)) for rank in range(WORKERS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [spans.get() for _ in processes]


WAYS: dict[str, Callable[[Any, int], list[Span]]] = {
    "one worker": one_worker,
    "hogwild": hogwild,
    "hogwild, locked": partial(hogwild, lock=True),
    "by hand": by_hand,
    "apart": partial(by_hand, shared=False),
    "one worker again": one_worker,
}


def microseconds(way: str, samples: Any, steps: int) -> float:
    """The microseconds of a sample of all workers together."""
    spans = WAYS[way](samples, steps)
    return 1e6 * (max(end for _, end in spans) - min(begin for begin, _ in spans)) / steps


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10, help="turns of each way")
    parser.add_argument("--steps", type=int, default=10_000, help="steps of all workers together in a turn")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    samples = EXAMPLE["samples"](20_000)
    taken = alternated({way: partial(microseconds, way, samples, arguments.steps) for way in WAYS}, arguments.repeats)
    print_ratios(taken, "one worker", "us", LIMITS)


if __name__ == "__main__":
    main()
