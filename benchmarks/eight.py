"""Eight short experiments on what a GPU alone shows: ``on_gpu.py --minutes 8`` runs them, and prints a row for each.

``python eight.py EXPERIMENT DEVICE FOLDER`` is a rank of one of them; rank 0 prints its numbers as JSON.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from on_gpu import REFERENCE, WAYS, Case
from torch import nn
from torch.nn.parallel import DistributedDataParallel

HAND, OWN = REFERENCE, "parwrap"
PLAIN = Case(nn.Module, (), "fp32")
"""No case of ``on_gpu.py``: each experiment builds its own model."""
FAILS_AT = 20
FAILS = "rank 1 fails"


class Rank(NamedTuple):
    """A rank of an experiment: its number, its device, where it writes, and where ranks meet next."""

    number: int
    device: str
    folder: Path
    meetings: Iterator[str]

    def ways(self) -> Iterator[str]:
        """The two ways, each in a process group that is open until the next one."""
        for way in (HAND, OWN):
            with WAYS[way][0](PLAIN, next(self.meetings)):
                torch.manual_seed(0)
                yield way

    def loop(self, way: str, model: nn.Module, x: torch.Tensor, lr: float = 0.01) -> Callable[[], torch.Tensor]:
        """A function that takes a training step on ``x``."""
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        forward = DistributedDataParallel(model, find_unused_parameters="rest" in dict(model.named_children())) if way == HAND else model

        def step() -> torch.Tensor:
            optimizer.zero_grad()
            loss = forward(x).float().square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return step

    def data(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(self.number)).to(self.device)

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def _layers(number: int, width: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(number)))


def checkpoint(rank: Rank) -> dict[str, Any]:
    """Rank 1 raises before backward 20, and rank 0 saves in its loop and in a ``finally``: the parent looks at what is on disk."""
    with WAYS[OWN][0](PLAIN, next(rank.meetings)):
        torch.manual_seed(0)
        model = _layers(4, 64).to(rank.device)
        step = rank.loop(OWN, model, rank.data(8, 64))
        try:
            for number in range(1, FAILS_AT + 2):
                if number == FAILS_AT:
                    if rank.number == 1:
                        raise RuntimeError(FAILS)
                    values = {name: value.tolist() for name, value in model.state_dict().items()}
                    (rank.folder / "before.pickle").write_bytes(pickle.dumps(values))
                step().item()
                torch.save(model.state_dict(), rank.folder / "a.pt")
        finally:
            torch.save(model.state_dict(), rank.folder / "b.pt")
    return {}


def first_forward(rank: Rank) -> dict[str, Any]:
    """Rank 1 raises in its first forward."""
    with WAYS[OWN][0](PLAIN, next(rank.meetings)):
        torch.manual_seed(0)
        model = _layers(4, 64).to(rank.device)
        if rank.number == 1:
            raise RuntimeError(FAILS)
        rank.loop(OWN, model, rank.data(8, 64))().item()
    return {}


def side_stream(rank: Rank) -> dict[str, Any]:
    """20 steps in a side stream: by how much weights differ at most from those of DDP by hand."""
    weights = []
    for way in rank.ways():
        model, stream = _layers(8, 512).to(rank.device), torch.cuda.Stream()
        x = rank.data(64, 512)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step = rank.loop(way, model, x)
            for _ in range(20):
                step()
        rank.synchronize()
        weights.append(torch.cat([p.detach().flatten().cpu() for p in model.parameters()]))
    return {"largest difference": float((weights[0] - weights[1]).abs().max())}


def memory(rank: Rank) -> dict[str, Any]:
    """The peak memory after the first backward of a large embedding in bf16, in MB."""
    peaks = {}
    for way in rank.ways():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        model = nn.Embedding(128256, 2048, dtype=torch.bfloat16, device=rank.device)
        forward = DistributedDataParallel(model) if way == HAND else model
        torch.optim.SGD(model.parameters(), lr=0.01)
        forward(torch.arange(64, device=rank.device)).float().square().mean().backward()
        rank.synchronize()
        peaks[way] = round(torch.cuda.max_memory_allocated() / 1e6)
        del model, forward
    return peaks


def host_time(rank: Rank) -> dict[str, Any]:
    """The time of the host for a step with 700 parameters, in ms: the median of steps 40 to 98, and the longest of steps 99 to 101."""
    found = {}
    for way in rank.ways():
        step, times = rank.loop(way, _layers(350, 16).to(rank.device), rank.data(4, 16)), []
        for _ in range(101):
            began = time.perf_counter()
            step()
            times.append(1e3 * (time.perf_counter() - began))
        rank.synchronize()
        found |= {way: round(median(times[39:98]), 2), f"{way}, 99 to 101": round(max(times[98:]), 2)}
    return found


class _Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.rest = _layers(4, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def unused_layer(rank: Rank) -> dict[str, Any]:
    """How often torch says that ten steady steps wait for the GPU, with a layer that no rank uses."""
    waits = {}
    for way in rank.ways():
        step = rank.loop(way, _Unused().to(rank.device), rank.data(8, 64))
        for _ in range(40):
            step()
        rank.synchronize()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            for _ in range(10):
                step()
            torch.cuda.set_sync_debug_mode("default")
        waits[way] = sum("synchroniz" in str(each.message) for each in said)
    return waits


def overlap(rank: Rank) -> dict[str, Any]:
    """Where the first all-reduce begins, as a part of the time from the first kernel of a step to its last one that is not NCCL's."""
    found = {}
    for compiled in (False, True):
        for way in rank.ways():
            model = _layers(12, 2048).to(rank.device)
            forward: Any = DistributedDataParallel(model) if way == HAND else model
            forward, x = torch.compile(forward) if compiled else forward, rank.data(256, 2048)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for number in range(6):
                rank.synchronize()
                optimizer.zero_grad()
                loss = forward(x).square().mean()
                rank.synchronize()
                profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
                with profiler if number == 5 else nullcontext():
                    loss.backward()
                    rank.synchronize()
            kernels = [each for each in profiler.events() if each.device_type == torch.autograd.DeviceType.CUDA]
            sends = [each.time_range.start for each in kernels if "nccl" in each.name.lower()]
            others = [each.time_range for each in kernels if "nccl" not in each.name.lower()]
            begins, ends = min(each.start for each in others), max(each.end for each in others)
            found[f"{way}, compiled" if compiled else way] = round((min(sends) - begins) / (ends - begins), 2) if sends else None
            torch._dynamo.reset()
    return found


def compiled_optimizer(rank: Rank) -> dict[str, Any]:
    """How many frames torch compiles for three steps of a compiled optimizer, and how often a graph breaks."""
    from torch._dynamo.utils import counters

    found = {}
    for way in rank.ways():
        torch._dynamo.reset()
        counters.clear()
        model = _layers(4, 64).to(rank.device)
        forward = DistributedDataParallel(model) if way == HAND else model
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        step = torch.compile(lambda optimizer=optimizer: optimizer.step(), backend="eager")
        for _ in range(3):
            optimizer.zero_grad()
            forward(rank.data(8, 64)).square().mean().backward()
            step()
        found |= {f"frames {way}": counters["frames"]["total"], f"breaks {way}": sum(counters["graph_break"].values())}
    return found


class Experiment(NamedTuple):
    """An experiment: its program, whether a CPU can run it, and what its numbers have to be."""

    run: Callable[[Rank], dict[str, Any]]
    on_cpu: bool
    wanted: Callable[[dict[str, Any]], bool]


EXPERIMENTS = {
    "checkpoints after a failure": Experiment(
        checkpoint, True, lambda n: n["a is kept"] and n["b is kept or absent"] and n["ends"] and n["raised"]
    ),
    "a failure in the first forward": Experiment(first_forward, True, lambda n: n["seconds"] < 40 and n["ends"] and n["raised"]),
    "20 steps in a side stream": Experiment(side_stream, False, lambda n: n["largest difference"] == 0),
    "peak MB of a large embedding": Experiment(memory, False, lambda n: n[OWN] <= 1.05 * n[HAND]),
    "host ms with 700 parameters": Experiment(host_time, True, lambda n: n[OWN] <= 1.25 * n[HAND]),
    "waits with an unused layer": Experiment(unused_layer, False, lambda n: n[OWN] <= n[HAND]),
    "where sending begins": Experiment(overlap, False, lambda n: n[f"{OWN}, compiled"] <= n[f"{HAND}, compiled"] + 0.1),
    "compiled optimizer": Experiment(compiled_optimizer, True, lambda n: n[f"breaks {OWN}"] <= n[f"breaks {HAND}"]),
}


def on_disk(folder: Path) -> dict[str, bool]:
    """Whether the checkpoints of a rank that failed hold the weights before the step that failed."""
    if not (folder / "before.pickle").exists():
        return {}
    before = {name: torch.tensor(value) for name, value in pickle.loads((folder / "before.pickle").read_bytes()).items()}

    def is_kept(name: str) -> bool:
        saved = torch.load(folder / name, map_location="cpu")
        return all(torch.equal(value, before[key]) for key, value in saved.items())

    return {"a is kept": is_kept("a.pt"), "b is kept or absent": not (folder / "b.pt").exists() or is_kept("b.pt")}


def main() -> None:
    """Run a rank of the experiment that the command line names."""
    name, device, folder = sys.argv[1:]
    number = int(os.environ["RANK"])
    meetings = (Path(folder, f"meeting-{each}").as_uri() for each in count())
    numbers = EXPERIMENTS[name].run(Rank(number, device, Path(folder), meetings))
    if number == 0:
        print(json.dumps(numbers), flush=True)


if __name__ == "__main__":
    main()
