"""A training step on a GPU: ``python benchmarks/on_gpu.py`` prints milliseconds of a step and ratios to DDP written by hand.

Two NCCL ranks share one GPU. NCCL takes each for a host of its own, so they meet over sockets, and a step takes longer than with a GPU for
each rank. With ``--ranks 1`` the reference is the plain loop of a single process. Ways take turns in the same processes, on batches that
are on the GPU; a turn is timed after the steps in which parwrap compares weights more often. "by hand again" is the reference once more.

``--minutes 8`` runs the experiments of ``eight.py`` instead, each with its part of that time, and prints a row for each; with ``--cpu``
those that a CPU can run. Without a GPU, and without ``--cpu``, nothing is measured, and the exit code is 2.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from timing import alternated, print_ratios
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

SETTLED, STEPS = 36, 100
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
REFERENCE = "by hand"


class Case(NamedTuple):
    """What is trained: a model, the shape of a rank's batch, and the dtype of ``amp``."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    dtype: str


def _resnet() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1)]
    for _ in range(8):
        layers += [nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def _transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Flatten(), nn.Linear(256 * 64, 10))


CASES = {
    "mlp": Case(lambda: nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)), (64, 512), "fp32"),
    "conv": Case(_resnet, (64, 3, 32, 32), "fp32"),
    "conv bf16": Case(_resnet, (64, 3, 32, 32), "bf16"),
    "conv fp16": Case(_resnet, (64, 3, 32, 32), "fp16"),
    "transformer bf16": Case(_transformer, (32, 64, 256), "bf16"),
}


def step_by_hand(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor, torch.Tensor], None]:
    ddp = DistributedDataParallel(model) if dist.get_world_size() > 1 else model
    dtype = DTYPES[case.dtype]
    scaler = torch.amp.GradScaler("cuda", enabled=case.dtype == "fp16")

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype) if dtype else nullcontext():
            loss = F.cross_entropy(ddp(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def plain_step(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor, torch.Tensor], None]:
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


@contextmanager
def by_hand(case: Case, meeting: str) -> Iterator[None]:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=ranks)
    yield
    dist.destroy_process_group()


@contextmanager
def parwrap(case: Case, meeting: str) -> Iterator[None]:
    from parwrap import amp, distributed

    os.environ["PARWRAP_INIT_METHOD"] = meeting
    with contextlib.redirect_stderr(io.StringIO()), distributed(), amp(dtype=case.dtype) if DTYPES[case.dtype] else nullcontext():
        yield


WAYS: dict[str, tuple[Callable[[Case, str], AbstractContextManager[None]], Callable]] = {
    REFERENCE: (by_hand, step_by_hand),
    "parwrap": (parwrap, plain_step),
    "by hand again": (by_hand, step_by_hand),
}


def turn(way: str, case: Case, meetings: Iterator[str], weights: set[str]) -> float:
    """Milliseconds of a step; adds a digest of the trained weights to ``weights``."""
    scope, made = WAYS[way]
    with scope(case, next(meetings)):
        torch.manual_seed(0)
        model = case.build().cuda()
        step = made(case, model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
        generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
        x, y = torch.randn(case.shape, generator=generator).cuda(), torch.randint(10, case.shape[:1], generator=generator).cuda()
        for _ in range(SETTLED):
            step(x, y)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(STEPS):
            step(x, y)
        torch.cuda.synchronize()
        milliseconds = 1e3 * (time.perf_counter() - began) / STEPS
        weights.add(hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())).hexdigest())
    return milliseconds


def as_host(rank: int) -> dict[str, str]:
    """The variables by which NCCL takes ``rank`` for a host of its own, because it refuses two ranks on one GPU of a host."""
    return {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1"}


def rank_process(rank: int, ranks: int, folder: str, cases: list[str], repeats: int) -> None:
    """Take all turns; rank 0 prints the table."""
    os.environ.update(as_host(rank), RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    torch.backends.cudnn.deterministic = True
    meetings = (Path(folder, str(number)).as_uri() for number in count())
    with ExitStack() as output:
        if rank:
            output.enter_context(contextlib.redirect_stdout(io.StringIO()))
        print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, NCCL ranks: {ranks}, turns of each way: {repeats}")
        for case in cases:
            print(f"\n{case:24}{'ms a step':>13}{'ratio':>8}   quartiles")
            weights: set[str] = set()
            ways = {way: partial(turn, way, CASES[case], meetings, weights) for way in WAYS}
            print_ratios(alternated(ways, repeats), REFERENCE, "ms", {"parwrap": 1.05})
            print(f"weights by hand and of parwrap: {'equal, bit for bit' if len(weights) == 1 else 'DIFFERENT'}", flush=True)


def run_experiment(name: str, device: str, seconds: float) -> tuple[dict[str, Any], str]:
    """The numbers of an experiment of ``eight.py`` on two ranks, and what its row ends with."""
    from eight import EXPERIMENTS, FAILS, on_disk

    with tempfile.TemporaryDirectory(prefix="on-gpu-") as folder:
        program, began = Path(__file__).with_name("eight.py"), time.monotonic()
        place = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        ranks = []
        for rank in range(2):
            hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
            environment = {**os.environ, **hidden, **as_host(rank), **place, "RANK": str(rank)}
            words = [sys.executable, str(program), name, device, folder]
            with Path(folder, f"errors-{rank}").open("w") as errors:
                ranks.append(subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True))
        try:
            for each in ranks:
                each.wait(max(began + seconds - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            return {}, f"NOT DONE in {seconds:.0f} s"
        finally:
            for each in ranks:
                each.kill()
        took, printed = time.monotonic() - began, ranks[0].communicate()[0].splitlines()
        numbers = json.loads(printed[-1]) if printed else {}
        if "failure" in name:
            raised = FAILS in Path(folder, "errors-1").read_text()  # and not something else
            numbers |= {"seconds": round(took, 1), "ends": ranks[0].returncode, "raised": raised}
            numbers |= on_disk(Path(folder)) if "checkpoints" in name else {}
        try:
            return numbers, "as wanted" if EXPERIMENTS[name].wanted(numbers) else "NOT as wanted"
        except KeyError:
            last = [Path(folder, f"errors-{rank}").read_text().strip().splitlines()[-1:] for rank in range(2)]
            return numbers, f"FAILED: {last}"


def experiments(minutes: float, device: str) -> None:
    """Run the experiments of ``eight.py`` and print a row for each."""
    from eight import EXPERIMENTS

    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"torch {torch.__version__}, two ranks on one {where}", flush=True)
    ends, left = time.monotonic() + 60 * minutes, len(EXPERIMENTS)
    for name, experiment in EXPERIMENTS.items():
        if device == "cpu" and not experiment.on_cpu:
            numbers, said = {}, "needs a GPU"
        else:
            numbers, said = run_experiment(name, device, (ends - time.monotonic()) / left)
        left -= 1
        print(f"{name:32}{said:15} {', '.join(f'{key}: {value}' for key, value in numbers.items())}", flush=True)


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=2)
    parser.add_argument("--repeats", type=int, default=10, help="turns of each way")
    parser.add_argument("--minutes", type=float, help="run the experiments of eight.py instead, in so many minutes")
    parser.add_argument("--cpu", action="store_true", help="with --minutes: run those that a CPU can run")
    arguments = parser.parse_args()
    if not torch.cuda.device_count() and not (arguments.cpu and arguments.minutes):
        parser.exit(2, "torch sees no GPU here: nothing is measured.\n")
    if arguments.minutes:
        experiments(arguments.minutes, "cpu" if arguments.cpu else "cuda")
        return
    with tempfile.TemporaryDirectory(prefix="on-gpu-") as folder:
        torch.multiprocessing.spawn(rank_process, (arguments.ranks, folder, arguments.cases, arguments.repeats), arguments.ranks)


if __name__ == "__main__":
    main()
