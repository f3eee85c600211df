"""``zero1`` and ``fsdp`` beside torch's own, written by hand: ``python benchmarks/beside_torch.py`` prints a table.

All ways train the same batches on the same two gloo ranks, with a thread each, in turns, and torch's again, which shows the noise.
ddp is timed beside ``DistributedDataParallel``; zero1 beside that with ``ZeroRedundancyOptimizer(parameters_as_bucket_view=True)``;
fsdp beside FSDP2, ``fully_shard`` of each layer and of the model. Ratios are medians over pairs of neighbouring passes.
``sync_bn`` has no row: torch's ``SyncBatchNorm`` takes no CPU tensors.
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

import torch
from overhead import CLASSES, RANKS, Case, Loop, _data, _group, _InDrawnOrder, _loader, _model, train_pass
from timing import alternated, print_ratios
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam
from torch.utils.data import DataLoader

WIDTH, DEPTH = 1024, 4


def _net() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(DEPTH)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


CASE = Case(_net, (WIDTH,), batch=64, steps=12)


@contextmanager
def _by_hand(strategy: str, meeting: str) -> Iterator[Loop]:
    with _group(meeting):
        model, data = _model(CASE), _data(CASE)
        loader = DataLoader(data, CASE.batch, sampler=_InDrawnOrder(data, drop_last=True))
        if strategy == "fsdp":
            mesh = torch.distributed.init_device_mesh("cpu", (RANKS,))
            for layer in model:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            yield Loop(model, Adam(model.parameters()), loader)
        elif strategy == "zero1":
            optimizer = ZeroRedundancyOptimizer(model.parameters(), Adam, parameters_as_bucket_view=True)
            yield Loop(DistributedDataParallel(model), optimizer, loader)
        else:
            yield Loop(DistributedDataParallel(model), Adam(model.parameters()), loader)


@contextmanager
def _parwrap(strategy: str, meeting: str) -> Iterator[Loop]:
    from parwrap import distributed, shard

    os.environ["PARWRAP_INIT_METHOD"] = meeting
    options = {"wrap": ("Sequential", "Linear")} if strategy == "fsdp" else {}
    with contextlib.redirect_stderr(io.StringIO()), distributed(strategy=strategy, **options):
        model = _model(CASE)
        yield Loop(model, Adam(model.parameters()), shard(_loader(CASE)))


WAYS: dict[str, Callable[[str, str], AbstractContextManager[Loop]]] = {"torch": _by_hand, "parwrap": _parwrap, "torch again": _by_hand}


def _turn(way: str, strategy: str, meeting: str) -> tuple[float, float]:
    """Seconds of a step in the second pass, and MiB of the optimizer's state."""
    with WAYS[way](strategy, meeting) as loop:
        train_pass(loop)
        seconds = train_pass(loop) / (CASE.steps - 1)
        states = getattr(loop.optimizer, "optim", loop.optimizer).state.values()
        local = [value.to_local() if isinstance(value, DTensor) else value for state in states for value in state.values()]
        return seconds, sum(value.nbytes for value in local if torch.is_tensor(value)) / 2**20


def rank_process(rank: int, folder: str, strategies: list[str], repeats: int) -> None:
    """Take all turns; rank 0 prints the table."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(RANKS))
    torch.set_num_threads(1)
    meetings = (Path(folder, str(number)).as_uri() for number in range(10**9))
    with contextlib.redirect_stdout(io.StringIO()) if rank else contextlib.nullcontext():
        for strategy in strategies:
            sizes: dict[str, float] = {}

            def milliseconds(way: str, strategy: str = strategy, sizes: dict[str, float] = sizes) -> float:
                seconds, sizes[way] = _turn(way, strategy, next(meetings))
                return 1e3 * seconds

            taken = alternated({way: partial(milliseconds, way) for way in WAYS}, repeats)
            print(f"{strategy}: the optimizer's state of a rank has {sizes['torch']:.1f} MiB by torch, {sizes['parwrap']:.1f} by parwrap")
            print_ratios(taken, "torch", "ms")


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", choices=["ddp", "zero1", "fsdp"], default=["ddp", "zero1", "fsdp"])
    parser.add_argument("--repeats", type=int, default=6, help="passes that each way trains")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="beside-") as folder:
        torch.multiprocessing.spawn(rank_process, (folder, arguments.strategies, arguments.repeats), RANKS)


if __name__ == "__main__":
    main()
