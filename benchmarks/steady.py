"""What a steady step costs: ``python benchmarks/steady.py`` counts parwrap's files, functions and calls, and times them beside DDP by hand.

A plain loop runs on two ranks, and rank 0 counts in nine steps of its first pass. Of each part it shows the step with the fewest calls:
where the other rank is ahead, a rank looks twice. ``--list`` names every call in its order.

The second table has the microseconds of a step that are spent around torch's own ``next``, forward, loss, backward and update, as
``overhead.py`` measures them: with 4, 150 and 700 parameters, for a model with one optimizer and for a GAN, whose two halves have so many
parameters together. Both ways train in turns on the same ranks, and a number is the median of all steps.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any, NamedTuple

import overhead
import torch
from overhead import RANKS, Clock
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

# calls

STEADY = range(50, 59)
"""The steps that are counted: by then the set of parameters is known, and no check of the first steps runs."""

PACKAGE = "parwrap/"


def count_calls(listed: bool) -> None:
    """Train on one pass and print what the steps in ``STEADY`` have called."""
    model = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 10))
    optimizer = SGD(model.parameters(), lr=0.1)
    batches = iter(DataLoader(TensorDataset(torch.randn(3200, 10), torch.randint(10, (3200,))), batch_size=16, shuffle=True))
    fewest: dict[str, list[tuple[str, str]]] = {}
    calls: dict[str, list[tuple[str, str]]] = {}
    part = ""

    def count(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and PACKAGE in code.co_filename:
            calls.setdefault(part, []).append((code.co_filename.rpartition(PACKAGE)[2], getattr(code, "co_qualname", code.co_name)))

    for step in range(STEADY.stop):
        calls = {}
        sys.setprofile(count if step in STEADY else None)
        part = "batch"
        x, y = next(batches)
        part = "zero_grad"
        optimizer.zero_grad()
        part = "loss"
        loss = nn.functional.cross_entropy(model(x), y)
        part = "backward"
        loss.backward()
        part = "step"
        optimizer.step()
        sys.setprofile(None)
        fewest |= {each: found for each, found in calls.items() if each not in fewest or len(found) < len(fewest[each])}
    print(f"{'':10}{'files':>8}{'functions':>12}{'calls':>8}")
    for each, found in fewest.items():
        print(f"{each:10}{len({file for file, _ in found}):8}{len({*found}):12}{len(found):8}")
    for each, found in fewest.items() if listed else ():
        for call in found:
            print("  ", each, *call)


# times

PARAMETERS = 4, 150, 700
STEPS = {4: 300, 150: 100, 700: 40}
ROUNDS = 6


class Trained(NamedTuple):
    """What a loop trains: a model, or the generator and the discriminator of a GAN, each with its optimizer."""

    models: list[nn.Module]
    optimizers: list[Any]
    loader: Any


@contextmanager
def by_hand(models: list[nn.Module], data: TensorDataset, meeting: str) -> Iterator[Trained]:
    with overhead._group(meeting):
        loader = DataLoader(data, 8, sampler=overhead._InDrawnOrder(data, drop_last=True))
        yield Trained([DistributedDataParallel(each) for each in models], [_optimizer(each) for each in models], loader)


@contextmanager
def parwrap(models: list[nn.Module], data: TensorDataset, meeting: str) -> Iterator[Trained]:
    from parwrap import distributed, shard

    os.environ["PARWRAP_INIT_METHOD"] = meeting
    with contextlib.redirect_stderr(io.StringIO()), distributed():
        yield Trained(models, [_optimizer(each) for each in models], shard(DataLoader(data, 8, shuffle=True)))


WAYS: dict[str, Callable[[list[nn.Module], TensorDataset, str], AbstractContextManager[Trained]]] = {"by hand": by_hand, "parwrap": parwrap}


def _layers(parameters: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(10, 10) for _ in range(parameters // 2)))


def _optimizer(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.001)


def one_set(trained: Trained, clock: Clock) -> None:
    """Train a model on two passes; the calls of the second are timed."""
    (optimizer,) = trained.optimizers
    for timed in (Clock(), clock):
        forward, loss_of, backward, step, draw = _timed(timed, trained)
        for x, y in draw:
            optimizer.zero_grad()
            loss = loss_of(forward[0](x), y)
            backward(loss)
            step[0]()


def gan(trained: Trained, clock: Clock) -> None:
    """Train a generator and a discriminator in turns, on two passes; the calls of the second are timed."""
    optimizers = trained.optimizers
    for timed in (Clock(), clock):
        (generate, judge), loss_of, backward, step, draw = _timed(timed, trained)
        for x, y in draw:
            fake = generate(x)
            optimizers[1].zero_grad()
            backward(loss_of(judge(torch.cat((x, fake.detach()))), torch.cat((y, y))))
            step[1]()
            optimizers[0].zero_grad()
            backward(loss_of(judge(fake), y))
            step[0]()


def _timed(clock: Clock, trained: Trained) -> tuple[list[Callable], Callable, Callable, list[Callable], Iterator]:
    """The forwards, the loss function, the backward, the steps and the batches of a pass, all timed."""
    for model in trained.models:
        module = model.module if isinstance(model, DistributedDataParallel) else model
        module.forward = clock.inside(type(module).forward.__get__(module))
    return (
        [clock.outside("forward", each) for each in trained.models],
        clock.outside("loss", lambda outputs, targets: F.cross_entropy(outputs, targets)),
        clock.outside("backward", torch.Tensor.backward),
        [clock.outside("step", each.step) for each in trained.optimizers],
        iter(overhead._TimedLoader(trained.loader, clock)),
    )


def rank_process(rank: int, folder: str) -> None:
    """Train in both ways, in turns; rank 0 prints the table."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(RANKS))
    torch.set_num_threads(1)
    meetings = (Path(folder, str(number)).as_uri() for number in range(10**9))
    with contextlib.redirect_stdout(io.StringIO()) if rank else contextlib.nullcontext():
        print(f"\nus a step{'':20}{'by hand':>10}{'parwrap':>10}{'ratio':>8}")
        for name, train, parts in (("one set", one_set, 1), ("GAN", gan, 2)):
            for parameters in PARAMETERS:
                clocks = {way: Clock() for way in WAYS}
                for turn in range(ROUNDS):
                    for way, clock in list(clocks.items())[:: 1 - turn % 2 * 2]:
                        _one_turn(way, train, [parameters // parts // 2 * 2] * parts, STEPS[parameters], next(meetings), clock)
                hand, own = (_of_a_step(clocks[way], parts) for way in WAYS)
                print(f"{name:10}{parameters:6} parameters{'':2}{hand:10.1f}{own:10.1f}{own / hand:8.2f}", flush=True)


def _one_turn(way: str, train: Callable[[Trained, Clock], None], sizes: list[int], steps: int, meeting: str, clock: Clock) -> None:
    torch.manual_seed(0)
    models = [_layers(size) for size in sizes]
    data = TensorDataset(torch.randn(RANKS * 8 * steps, 10), torch.randint(10, (RANKS * 8 * steps,)))
    with clock.of_torch(), WAYS[way](models, data, meeting) as trained:
        train(trained, clock)
        time.sleep(0.05)  # a group that ends waits for its threads with the GIL held, which their last work may still need


def _of_a_step(clock: Clock, backwards: int) -> float:
    """The microseconds of all parts of a step, which has so many backwards: each part counts as often as it runs."""
    often = {"next": 1, "forward": 2 * backwards - 1, "loss": backwards, "backward": backwards, "step": backwards}
    return sum(1e6 * median(clock.around[part]) * times for part, times in often.items())


def main() -> None:
    """Count, then time."""
    command = [sys.executable, "-m", "parwrap", "run", "--nproc-per-node", str(RANKS), "--quiet", __file__, "--on-ranks", *sys.argv[1:]]
    subprocess.run(command, check=True)
    if "--list" not in sys.argv:
        os.environ["OMP_NUM_THREADS"] = "1"
        with tempfile.TemporaryDirectory(prefix="steady-") as folder:
            torch.multiprocessing.spawn(rank_process, (folder,), RANKS)


if __name__ == "__main__":
    if "--on-ranks" in sys.argv:
        count_calls("--list" in sys.argv)
    else:
        main()
