"""A compiled model: ``python benchmarks/compiled.py`` times a step beside ``DistributedDataParallel`` by hand, compiled too, in turns.

Both ways train the same batches on the same two gloo ranks, with a thread each, and again by hand, which shows the noise. ``uncompiled`` is
the same model without ``torch.compile``. Ratios are medians over pairs of neighbouring passes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import tempfile
from functools import partial
from pathlib import Path

import overhead
import torch
from overhead import RANKS, Case
from torch import nn

WIDTH, DEPTH = 1024, 17


class Net(nn.Module):
    """Layers whose gradients fill several buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.last = nn.Linear(WIDTH, overhead.CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.last(x)


def _built(backend: str) -> nn.Module:
    """A compiled model: nothing of what another turn has compiled counts for it."""
    torch._dynamo.reset()
    model = Net()
    if backend != "uncompiled":
        model.compile(backend=backend)
    return model


def rank_process(rank: int, folder: str, backend: str, repeats: int) -> None:
    """Take all turns; rank 0 prints the table."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(RANKS))
    torch.set_num_threads(1)
    meetings = (Path(folder, str(number)).as_uri() for number in range(10**9))
    case = Case(partial(_built, backend), (WIDTH,), 64, 8)
    with contextlib.redirect_stdout(io.StringIO()) if rank else contextlib.nullcontext():
        print(f"{'backend':12}{'way':16}{'ms a step':>10}{'ratio':>8}   quartiles")
        taken = overhead._in_turns([overhead.REFERENCE, "parwrap", "by hand again"], case, meetings, repeats)
        overhead._print_steps(f"{backend:12}", taken)


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", nargs="+", choices=["aot_eager", "inductor", "uncompiled"], default=["aot_eager", "uncompiled"])
    parser.add_argument("--repeats", type=int, default=10, help="passes that each way trains")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    for backend in arguments.backend:
        with tempfile.TemporaryDirectory(prefix="compiled-") as folder:
            torch.multiprocessing.spawn(rank_process, (folder, backend, arguments.repeats), RANKS)


if __name__ == "__main__":
    main()
