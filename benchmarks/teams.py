"""Two ranks that train when they are told to, with DDP written by hand or inside ``parwrap.distributed``.

Both run the same loop on the same model and data. Between two blocks of steps the ranks wait for a word on a pipe and use no CPU, so
several teams can be kept ready and take turns. Who trains when, and what the times mean, is the caller's.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

__all__ = ["RANKS", "End", "Team", "start_fork_server"]

RANKS = 2
ACCUMULATED = 4
BATCHES = 8
"""Different batches that a rank goes round and round through: a loader would add noise."""


def start_fork_server() -> None:
    """Start the process that imports torch once for all ranks; ``torch._dynamo`` is what the first optimizer imports, in a second."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # nobody trains with code that is compiled anew in each process
    os.environ["OMP_NUM_THREADS"] = "1"
    forkserver.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo"])
    forkserver.ensure_running()


@dataclass(frozen=True)
class End:
    """How a rank ended.

    Attributes:
        peak_memory: of its process, in MB.
        weights: a digest of the model's parameters.
    """

    peak_memory: float
    weights: str


class Team:
    """The ranks that train one case in one way; a context manager.

    Args:
        way: a name in ``WAYS``.
        case: a name in ``models.CASES``.
    """

    def __init__(self, way: str, case: str) -> None:
        self._way, self._case = way, case
        self._pipes: list[Connection] = []
        self._undo = ExitStack()

    def __enter__(self) -> Team:
        context = multiprocessing.get_context("forkserver")
        folder = self._undo.enter_context(tempfile.TemporaryDirectory(prefix="overhead-"))
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_run, args=(WAYS[self._way], self._case, rank, folder, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._undo.callback(process.join)
            self._undo.push(lambda *exception, process=process: process.kill() if any(exception) else None)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._undo.__exit__(*exception)

    def train(self, steps: int) -> float:
        """Train a block of steps; returns the seconds of each on rank 0. No rank works any more when this returns."""
        return self._tell(steps)[0] / steps

    def end(self) -> End:
        """Have the ranks leave; returns how rank 0 ended."""
        return self._tell(0)[0]

    def _tell(self, steps: int) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(steps)
        return [pipe.recv() for pipe in self._pipes]


def _run(train: Callable, case: str, rank: int, folder: str, words: Connection) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(RANKS),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(RANKS),
        PARWRAP_INIT_METHOD=Path(folder, "meeting").as_uri(),
    )
    train(case, words)


def _by_hand(case: str, words: Connection, train: Callable | None = None) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=os.environ["PARWRAP_INIT_METHOD"], rank=rank, world_size=size)
    _train_when_told(DistributedDataParallel(_model(case)), case, words, train or _train)
    dist.destroy_process_group()


def _with_parwrap(case: str, words: Connection, feature: Callable = lambda function: function) -> None:
    import parwrap

    @parwrap.distributed
    @feature
    def train() -> None:
        _train_when_told(_model(case), case, words, _train)

    with contextlib.redirect_stderr(io.StringIO()):  # the line at the start of a run is no part of the table
        train()


def _with_sync_bn(case: str, words: Connection) -> None:
    import parwrap

    _with_parwrap(case, words, parwrap.sync_bn)


def _with_accumulation(case: str, words: Connection) -> None:
    import parwrap

    _with_parwrap(case, words, parwrap.accumulate(ACCUMULATED))


def _sending_each_batch(case: str, words: Connection) -> None:
    _by_hand(case, words, _train_accumulating)


WAYS = {
    "by hand": _by_hand,
    "parwrap": _with_parwrap,
    "sync_bn": _with_sync_bn,
    "accumulate": _with_accumulation,
    "sending each batch": _sending_each_batch,
}


def _model(case: str) -> Any:
    import torch
    from models import CASES

    torch.manual_seed(0)
    return CASES[case].build()


def _train_when_told(model: Any, case: str, words: Connection, train: Callable) -> None:
    """Train a block for each number of steps that ``words`` has, until it is 0."""
    import torch
    import torch.distributed as dist
    from models import CASES

    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = itertools.cycle([CASES[case].batch(generator) for _ in range(BATCHES)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    while steps := words.recv():
        dist.barrier()
        begin = time.perf_counter()
        train(model, optimizer, torch.nn.functional.cross_entropy, itertools.islice(batches, steps))
        words.send(time.perf_counter() - begin)
    words.send(End(_peak_memory(), _digest(model.parameters())))


def _train(model: Any, optimizer: Any, criterion: Callable, batches: Iterable) -> None:
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward()
        optimizer.step()


def _train_accumulating(model: Any, optimizer: Any, criterion: Callable, batches: Iterable) -> None:
    for number, (inputs, targets) in enumerate(batches):
        loss = criterion(model(inputs), targets) / ACCUMULATED
        loss.backward()
        if (number + 1) % ACCUMULATED == 0:
            optimizer.step()
            optimizer.zero_grad()


def _peak_memory() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on a Mac, elsewhere in KiB
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6


def _digest(parameters: Iterable) -> str:
    digest = hashlib.sha256()
    for parameter in parameters:
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()
