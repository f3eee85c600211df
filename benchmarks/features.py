"""What ``@sync_bn`` and ``@explain`` cost and ``@accumulate`` saves: ``python benchmarks/features.py`` prints milliseconds and ratios.

Two gloo ranks with a thread each train passes in turns, as in ``overhead.py``. The references are written by hand with
``DistributedDataParallel``: with plain batch norms, and with an optimizer step every 4 batches, which sends gradients after each batch. The
reference of ``@explain`` is parwrap without it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from overhead import CASES, RANKS, WAYS, Case, Loop, turn
from timing import alternated, print_ratios
from torch import nn

STEPS = 4


@contextmanager
def within(feature: Callable[[], AbstractContextManager], case: Case, meeting: str) -> Iterator[Loop]:
    """parwrap with a ``feature``."""
    with WAYS["parwrap"](case, meeting) as loop, feature():
        yield loop


@contextmanager
def accumulating(case: Case, meeting: str) -> Iterator[Loop]:
    """An optimizer step every 4 batches, by hand."""
    with WAYS["by hand"](case, meeting) as loop:
        yield loop._replace(optimizer=_EveryFourth(loop.optimizer), backward=lambda loss: (loss / STEPS).backward())


class _EveryFourth:
    def __init__(self, optimizer: Any) -> None:
        self._optimizer, self._batches = optimizer, 0

    def zero_grad(self) -> None:
        if self._batches % STEPS == 0:
            self._optimizer.zero_grad()

    def step(self) -> None:
        self._batches += 1
        if self._batches % STEPS == 0:
            self._optimizer.step()


def sync_bn() -> AbstractContextManager:
    import parwrap

    return parwrap.sync_bn()


def accumulate() -> AbstractContextManager:
    import parwrap

    return parwrap.accumulate(STEPS)


@contextmanager
def explain() -> Iterator[None]:
    import parwrap

    with contextlib.redirect_stderr(io.StringIO()), parwrap.explain():
        yield


WAYS |= {
    "sync_bn": partial(within, sync_bn),
    "accumulate": partial(within, accumulate),
    "sending each batch": accumulating,
    "explain": partial(within, explain),
}


class Residual(nn.Module):
    """Two convolutions with batch norms, beside a shortcut."""

    def __init__(self, channels: int, after: int, stride: int) -> None:
        super().__init__()
        first = nn.Conv2d(channels, after, 3, stride, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()
        self.inner = nn.Sequential(*first, nn.Conv2d(after, after, 3, padding=1, bias=False), nn.BatchNorm2d(after))
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(channels, after, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.inner(x) + self.shortcut(x))


def resnet() -> nn.Module:
    blocks = Residual(16, 32, 2), Residual(32, 32, 1), Residual(32, 64, 2), Residual(64, 64, 1)
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


CASES |= {"resnet": Case(resnet, (3, 32, 32), batch=8, steps=60)}

COMPARISONS = {
    "sync_bn": ("resnet", "by hand", 1.3),
    "accumulate": ("wide", "sending each batch", 0.8),
    "explain": ("wide", "parwrap", 1.02),
}
"""The case, the reference and the limit of each feature."""


def rank_process(rank: int, folder: str, features: list[str], repeats: int) -> None:
    """Take all turns; rank 0 prints."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(RANKS))
    torch.set_num_threads(1)
    meetings = (Path(folder, str(number)).as_uri() for number in range(10**9))
    for feature in features:
        case, reference, limit = COMPARISONS[feature]

        def milliseconds(way: str, case: str = case) -> float:
            return 1e3 * turn(way, CASES[case], next(meetings)).seconds

        ways = {reference: reference, feature: feature, f"{reference} again": reference}
        taken = alternated({name: partial(milliseconds, way) for name, way in ways.items()}, repeats)
        if rank == 0:
            print(f"{case}:")
            print_ratios(taken, reference, "ms", {feature: limit})


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", nargs="+", choices=COMPARISONS, default=list(COMPARISONS))
    parser.add_argument("--repeats", type=int, default=10, help="passes that each way trains")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="features-") as folder:
        torch.multiprocessing.spawn(rank_process, (folder, arguments.features, arguments.repeats), RANKS)


if __name__ == "__main__":
    main()
