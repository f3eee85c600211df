"""What parwrap sends beside hand-written DDP, on many nodes: ``python benchmarks/scale.py`` prints a table.

A node is a network namespace with one rank, so all that its interface carries is the traffic of that rank. Both ways to train run the same
loop with the same small model. The counters of the interface are read when all ranks stand still. *Regular* steps are those between two
checks of the weights; *checked* steps are all from the fourth to the 32nd, with their four checks. Bytes are those sent and received.
Needs root on Linux; nothing is asserted.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # before torch is imported

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import parwrap

__all__ = ["address", "network"]

INTERFACE = "wire"
NAMESPACES = Path("/run/netns")
CLONE_NEWNET = 0x40000000

FIRST, START, CHECKED, LAST = 5, 3, 32, 63
"""Steps: the first five are timed; counters are read after the others. Weights are checked after steps 1, 2, 3, 4, 8, 16, 32 and 64."""

QUIET = 1.0
"""Seconds in which all ranks end a step, and seconds in which they read their counters."""

WITHIN = 240.0
"""Seconds after which a run is given up."""

BATCH = 4


def ip(*arguments: str) -> None:
    """Run the command ``ip``.

    Raises:
        OSError: it fails, or does not exist; the text says why.
    """
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def address(node: int) -> str:
    """The address of a node in a :func:`network`."""
    return f"10.78.{node // 250}.{node % 250 + 1}"


@contextmanager
def network(nodes: int) -> Iterator[list[str]]:
    """Network namespaces, one a node, on a common bridge inside the block; those of a run that was killed are removed first.

    Raises:
        OSError: they are not permitted here.
    """
    for left in NAMESPACES.glob("parwrap-*-*"):
        if not Path("/proc", left.name.split("-")[1]).exists():
            ip("netns", "del", left.name)
    hub, *names = (f"parwrap-{os.getpid()}-{name}" for name in ("hub", *range(nodes)))
    made = []
    try:
        for name in (hub, *names):
            ip("netns", "add", name)
            made.append(name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        ip("-n", hub, "link", "set", "bridge", "up")
        for node, name in enumerate(names):
            ip("-n", name, "link", "add", INTERFACE, "type", "veth", "peer", "name", f"port{node}", "netns", hub)
            ip("-n", hub, "link", "set", f"port{node}", "master", "bridge", "up")
            ip("-n", name, "addr", "add", f"{address(node)}/16", "dev", INTERFACE)
            ip("-n", name, "link", "set", INTERFACE, "up")
        yield names
    finally:
        for name in made:
            ip("netns", "del", name)


class Measured(NamedTuple):
    """What one rank has measured.

    Attributes:
        first: seconds from the start of the training to the end of the fifth step.
        checked: bytes sent and received in a step from the fourth to the 32nd, with four checks of the weights.
        regular: bytes in a step after that.
    """

    first: float
    checked: float
    regular: float


class Meter:
    """Reads the clock and the counters of this node's interface after some steps."""

    def __init__(self) -> None:
        self._counters = Path("/proc/self/net/dev").open()  # noqa: SIM115 parwrap may hide a file that is opened later
        self._began = self._first = 0.0
        self._read: dict[int, int] = {}

    def begin(self) -> None:
        """The training begins."""
        self._began = time.monotonic()

    def after_step(self, step: int) -> None:
        """A step has ended."""
        if step == FIRST:
            self._first = time.monotonic() - self._began
        if step in (START, CHECKED, LAST):
            paused = time.monotonic()
            time.sleep(QUIET)
            self._counters.seek(0)
            numbers = re.search(rf"{INTERFACE}:(.*)", self._counters.read())[1].split()
            self._read[step] = int(numbers[0]) + int(numbers[8])
            time.sleep(QUIET)
            if step < FIRST:
                self._began += time.monotonic() - paused

    def measured(self) -> Measured:
        start, checked, last = (self._read[step] for step in (START, CHECKED, LAST))
        return Measured(self._first, (checked - start) / (CHECKED - START), (last - checked) / (LAST - CHECKED))


def dataset(ranks: int) -> Dataset:
    """Samples for the steps of all ranks."""
    generator = torch.Generator().manual_seed(0)
    samples = LAST * BATCH * ranks
    return TensorDataset(torch.randn(samples, 32, generator=generator), torch.randint(10, (samples,), generator=generator))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def train(model: nn.Module, loader: DataLoader, meter: Meter) -> None:
    """The loop, which is the same for both."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step, (x, y) in enumerate(loader, 1):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        meter.after_step(step)


def by_hand(ranks: int, meter: Meter) -> None:
    """Train as torch's manual says."""
    dist.init_process_group("gloo")
    dist.barrier()
    meter.begin()
    data = dataset(ranks)
    train(DistributedDataParallel(model()), DataLoader(data, BATCH, sampler=DistributedSampler(data)), meter)
    dist.destroy_process_group()


def with_parwrap(ranks: int, meter: Meter) -> None:
    """Train as on one rank."""
    with parwrap.distributed():
        meter.begin()
        train(model(), DataLoader(dataset(ranks), BATCH, shuffle=True), meter)


WAYS: dict[str, Callable[[int, Meter], None]] = {"DDP by hand": by_hand, "parwrap": with_parwrap}


def rank_process(rank: int, names: list[str], way: str, port: int) -> tuple[int, int]:
    """Start a rank in its namespace. Returns the process and a pipe for what it measures."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    if process := os.fork():
        os.close(writing)
        return process, reading
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        namespace = os.open(NAMESPACES / names[rank], os.O_RDONLY)
        if ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        place = {"RANK": rank, "WORLD_SIZE": len(names), "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": rank}
        meeting = {"MASTER_ADDR": address(0), "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": INTERFACE}
        os.environ.update({name: str(value) for name, value in {**place, **meeting}.items()})
        meter = Meter()
        WAYS[way](len(names), meter)
        os.write(writing, json.dumps(meter.measured()).encode())
        os._exit(0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def measured(names: list[str], way: str, port: int) -> list[Measured]:
    """What the ranks of one run have measured.

    Raises:
        RuntimeError: a rank has failed, or has taken too long.
    """
    ranks = [rank_process(rank, names, way, port) for rank in range(len(names))]
    until, results = time.monotonic() + WITHIN, []
    try:
        for _, pipe in ranks:
            ready, _, _ = select.select([pipe], [], [], max(0.0, until - time.monotonic()))
            text = os.read(pipe, 4096) if ready else b""
            if not text:
                raise RuntimeError(f"{way} on {len(names)} nodes: a rank has measured nothing")
            results.append(Measured(*json.loads(text)))
    finally:
        for process, pipe in ranks:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            os.close(pipe)
    return results


def import_the_rest() -> None:
    """Import what torch imports at the first step of an optimizer, a second of work, before ranks are forked."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter]).step()


def summary(turns: list[list[Measured]]) -> Measured:
    """The time of the slowest rank and the bytes of a mean rank, each in the median turn."""
    slowest = median(max(each.first for each in turn) for turn in turns)
    return Measured(slowest, *(median(mean(each[part] for each in turn) for turn in turns) for part in (1, 2)))


def main() -> int:
    """Measure what the command line asks for, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4, 16], help="how many nodes train together")
    parser.add_argument("--turns", type=int, default=3, help="turns that each way to train has; the median is shown")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    import_the_rest()
    print(f"{'nodes':>5}  {'':<12} {'regular step':>14} {'checked step':>14} {'first five steps':>18}")
    for nodes in arguments.nodes:
        with network(nodes) as names:
            turns = [{way: measured(names, way, 29600 + turn) for way in WAYS} for turn in range(arguments.turns)]
        rows = {way: summary([turn[way] for turn in turns]) for way in WAYS}
        hand, ours = rows.values()
        rows["difference"] = Measured(*(a - b for a, b in zip(ours, hand, strict=True)))
        for way, row in rows.items():
            print(f"{nodes:>5}  {way:<12} {row.regular:>12.0f} B {row.checked:>12.0f} B {row.first:>16.2f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
