"""What parwrap adds to a training step: ``python benchmarks/overhead.py`` prints two tables. Needs the extra ``bench``.

The first table has milliseconds of a step and their ratio to ``DistributedDataParallel`` written by hand. The same two gloo ranks, with a
thread each, train one pass after another in each way, in turns; a number is the median of its passes, and a ratio that of pairs from the
same round. The last column shows how far the ratios spread (their quartiles). "by hand again" is the reference a second time: its distance
from 1 is noise. Loaders, models and optimizers are the same in all ways. Accelerate and Fabric read their samples in another order.

The second table has the microseconds of a step that are spent around torch's own ``next``, forward, loss, backward and update: by parwrap
in its Python code, and by the hand-written loop in DDP's forward and in torch's wrappers. The difference is parwrap's own time. DDP's
forward also broadcasts the buffers of "conv", which parwrap does before evaluation. Medians leave out the checksum of weights that is taken
every 100th step; the first table has it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import io
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import sgd
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

RANKS = 2
CLASSES = 10
REFERENCE = "by hand"


class Case(NamedTuple):
    """What is trained.

    Attributes:
        build: makes the model.
        shape: the shape of a sample.
        batch: the samples in a batch of a rank.
        steps: the steps of a pass.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch: int
    steps: int


CASES = {
    "tiny": Case(lambda: nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, CLASSES)), (10,), batch=32, steps=400),
    "wide": Case(
        lambda: nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, CLASSES)),
        (512,),
        batch=64,
        steps=50,
    ),
    "conv": Case(
        lambda: nn.Sequential(*_block(3, 16), *_block(16, 32), *_block(32, 64), nn.Flatten(), nn.Linear(64 * 16, CLASSES)),
        (3, 32, 32),
        batch=16,
        steps=100,
    ),
    "150": Case(lambda: _layers(75), (10,), batch=8, steps=100),
    "700": Case(lambda: _layers(350), (10,), batch=8, steps=40),
}
"""The last two have so many parameters, in small layers: what a step does for each of them in Python shows there."""


def _layers(layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(10, 10) for _ in range(layers)))


def _block(channels: int, after: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(channels, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)


# the ways to train


class _InDrawnOrder(DistributedSampler):
    """Reads in turn the order that one process draws, as parwrap does."""

    def __iter__(self) -> Iterator:
        self.seed = int(torch.empty((), dtype=torch.int64).random_())
        return super().__iter__()


class Loop(NamedTuple):
    """What a way makes of a plain loop.

    Attributes:
        model: the model to call.
        optimizer: its optimizer.
        loader: a loader of this rank's batches.
        backward: runs the backward of a loss.
        criterion: computes the loss; looks it up in torch, as scripts do.
    """

    model: nn.Module
    optimizer: Any
    loader: Any
    backward: Callable[[torch.Tensor], Any] = torch.Tensor.backward
    criterion: Callable[..., torch.Tensor] = lambda outputs, targets: F.cross_entropy(outputs, targets)


class Turn(NamedTuple):
    """One turn of a way: two passes, of which the first only warms up.

    Attributes:
        seconds: of a step in the second pass.
        weights: a digest of the trained weights.
    """

    seconds: float
    weights: str


@contextmanager
def by_hand(case: Case, meeting: str) -> Iterator[Loop]:
    with _group(meeting):
        model, data = _model(case), _data(case)
        loader = DataLoader(data, case.batch, sampler=_InDrawnOrder(data, drop_last=True))
        yield Loop(DistributedDataParallel(model), _optimizer(model), loader)


@contextmanager
def parwrap(case: Case, meeting: str) -> Iterator[Loop]:
    from parwrap import distributed, shard

    os.environ["PARWRAP_INIT_METHOD"] = meeting
    with contextlib.redirect_stderr(io.StringIO()), distributed():  # it says once what a pass has read
        model = _model(case)
        yield Loop(model, _optimizer(model), shard(_loader(case)))  # the pass that is timed is another loop than the one before


@contextmanager
def whole(case: Case, meeting: str) -> Iterator[Loop]:
    from parwrap import distributed

    os.environ["PARWRAP_INIT_METHOD"] = meeting
    with contextlib.redirect_stderr(io.StringIO()), distributed(batch="whole"):
        model = _model(case)
        yield Loop(model, _optimizer(model), DataLoader(_data(case), case.batch * RANKS, shuffle=True))


@contextmanager
def accelerate(case: Case, meeting: str) -> Iterator[Loop]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    with _group(meeting):
        accelerator = Accelerator(cpu=True)
        model = _model(case)
        model, optimizer, loader = accelerator.prepare(model, _optimizer(model), _loader(case))
        yield Loop(model, optimizer, loader, accelerator.backward)
        AcceleratorState._reset_state(reset_partial_state=True)  # nothing public makes an Accelerator in a second group


@contextmanager
def fabric(case: Case, meeting: str) -> Iterator[Loop]:
    from lightning_fabric import Fabric

    with _group(meeting):
        fabric = Fabric(accelerator="cpu", devices=RANKS, strategy="ddp")
        fabric.launch()
        model = _model(case)
        model, optimizer = fabric.setup(model, _optimizer(model))
        yield Loop(model, optimizer, fabric.setup_dataloaders(_loader(case)), fabric.backward)


WAYS: dict[str, Callable[[Case, str], AbstractContextManager[Loop]]] = {
    REFERENCE: by_hand,
    "parwrap": parwrap,
    'batch="whole"': whole,
    "accelerate": accelerate,
    "Fabric": fabric,
    "by hand again": by_hand,
}

PACKAGES = {"accelerate": "accelerate", "Fabric": "lightning_fabric"}
"""What the ways need that parwrap itself does not."""


@contextmanager
def _group(meeting: str) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=meeting, rank=int(os.environ["RANK"]), world_size=RANKS)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _model(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.build()


def _optimizer(model: nn.Module) -> sgd.SGD:
    return sgd.SGD(model.parameters(), lr=0.01, momentum=0.9)


def _loader(case: Case) -> DataLoader:
    return DataLoader(_data(case), case.batch, shuffle=True)


def _data(case: Case) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    samples = RANKS * case.batch * case.steps
    return TensorDataset(torch.randn(samples, *case.shape, generator=generator), torch.randint(CLASSES, (samples,), generator=generator))


# one turn


@dataclass
class Clock:
    """Times calls, and those of torch inside of them.

    Attributes:
        inner: the seconds of the calls inside since the last outer call ended.
        around: the seconds of each outer call without the inner ones, by name.
    """

    inner: float = 0.0
    around: dict[str, list[float]] = field(default_factory=dict)

    def outside(self, name: str, call: Callable) -> Callable:
        """``call``, timed as an outer call."""
        times = self.around.setdefault(name, [])

        def timed(*args: Any) -> Any:
            self.inner, began = 0.0, time.perf_counter()
            result = call(*args)
            times.append(time.perf_counter() - began - self.inner)
            return result

        return timed

    def inside(self, call: Callable) -> Callable:
        """``call``, timed as an inner call."""

        def timed(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                self.inner += time.perf_counter() - began

        return timed

    @contextmanager
    def of_torch(self) -> Iterator[None]:
        """Inside the block, torch's backward, ``next`` and update are inner calls, also for whoever patches them later."""
        iterator = type(iter(DataLoader(TensorDataset(torch.zeros(1)))))
        places = (torch.autograd, "backward"), (iterator, "__next__"), (sgd, "sgd"), (torch._C._nn, "cross_entropy_loss")
        originals = [getattr(owner, name) for owner, name in places]
        for (owner, name), original in zip(places, originals, strict=True):
            setattr(owner, name, self.inside(original))
        try:
            yield
        finally:
            for (owner, name), original in zip(places, originals, strict=True):
                setattr(owner, name, original)


def turn(way: str, case: Case, meeting: str, clock: Clock | None = None) -> Turn:
    """Train in one ``way``; with a ``clock``, every call of the second pass is timed too."""
    with clock.of_torch() if clock else nullcontext(), WAYS[way](case, meeting) as loop:
        train_pass(loop)
        gc.collect()
        seconds = train_pass(_timed(loop, clock) if clock else loop) / (case.steps - 1)
        weights = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in loop.model.parameters())).hexdigest()
        time.sleep(0.05)  # a group that ends waits for its threads with the GIL held, which their last work may still need
    return Turn(seconds, weights)


def _timed(loop: Loop, clock: Clock) -> Loop:
    module = loop.model.module if isinstance(loop.model, DistributedDataParallel) else loop.model
    module.forward = clock.inside(module.forward)
    return Loop(
        clock.outside("forward", loop.model),  # type: ignore[arg-type]
        _Named(zero_grad=loop.optimizer.zero_grad, step=clock.outside("step", loop.optimizer.step)),
        _TimedLoader(loop.loader, clock),
        clock.outside("backward", loop.backward),
        clock.outside("loss", loop.criterion),
    )


class _Named:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class _TimedLoader:
    def __init__(self, loader: Any, clock: Clock) -> None:
        self._loader, self._clock = loader, clock

    def __iter__(self) -> Iterator:
        draw = self._clock.outside("next", iter(self._loader).__next__)
        while True:
            try:
                batch = draw()
            except StopIteration:
                return
            yield batch


def train_pass(loop: Loop) -> float:
    """Train one pass; returns the seconds of all its steps but the first."""
    model, optimizer, loader, backward, criterion = loop
    began = 0.0
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        backward(loss)
        optimizer.step()
        began = began or time.perf_counter()
    return time.perf_counter() - began


# both ranks


def rank_process(rank: int, folder: str, cases: Sequence[str], ways: Sequence[str], repeats: int) -> None:
    """Take all turns; rank 0 prints the tables."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(RANKS))
    torch.set_num_threads(1)
    meetings = (Path(folder, str(number)).as_uri() for number in range(10**9))
    output = ExitStack()
    if rank:
        output.enter_context(contextlib.redirect_stdout(io.StringIO()))
    with output:
        print(f"torch {torch.__version__}, {RANKS} gloo ranks, {os.cpu_count()} cores, {repeats} passes each")
        print(f"\n{'case':8}{'way':16}{'ms a step':>10}{'ratio':>8}   quartiles")
        for case in cases:
            _print_steps(case, _in_turns(ways, CASES[case], meetings, repeats))
        print(f"\nus a step {'':8}{'way':10}" + "".join(f"{part:>10}" for part in (*PARTS, "all")))
        for case in cases:
            _print_own_time(case, meetings)


def _in_turns(ways: Sequence[str], case: Case, meetings: Iterator[str], repeats: int) -> dict[str, list[Turn]]:
    """The turns of each way, in rounds that go through the ways forwards and backwards in turn."""
    taken: dict[str, list[Turn]] = {way: [] for way in ways}
    order = list(ways)
    for _ in range(repeats):
        for way in order:
            taken[way].append(turn(way, case, next(meetings)))
        order.reverse()
    return taken


def _print_steps(case: str, taken: dict[str, list[Turn]]) -> None:
    base = [each.seconds for each in taken[REFERENCE]]
    for way, turns in taken.items():
        times = [each.seconds for each in turns]
        ratios = [seconds / reference for seconds, reference in zip(times, base, strict=True)]
        low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        print(f"{case:8}{way:16}{1e3 * median(times):10.3f}{median(ratios):8.3f}   {low:.3f} to {high:.3f}", flush=True)
    if "parwrap" in taken:
        weights = {each.weights for way in (REFERENCE, "parwrap") for each in taken[way]}
        print(f"{case:8}weights by hand and of parwrap: {'equal, bit for bit' if len(weights) == 1 else 'DIFFERENT'}", flush=True)


PARTS = "next", "forward", "loss", "backward", "step"


def _print_own_time(case: str, meetings: Iterator[str]) -> None:
    """The time around torch's own calls; several turns, so that one unlucky process does not decide."""
    for way in (REFERENCE, "parwrap"):
        clock = Clock()
        for _ in range(3):
            turn(way, CASES[case], next(meetings), clock)
        times = [1e6 * median(clock.around[part]) for part in PARTS]
        print(f"{case:18}{way:10}" + "".join(f"{each:10.1f}" for each in (*times, sum(times))), flush=True)


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["tiny", "wide", "conv"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="what to compare; 'by hand' is always measured")
    parser.add_argument("--repeats", type=int, default=10, help="passes that each way trains")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # users have compiled files
    ways = list(dict.fromkeys([REFERENCE, *arguments.ways]))
    for way in [way for way in ways if way in PACKAGES and find_spec(PACKAGES[way]) is None]:
        print(f"{way} is left out: {PACKAGES[way]} is not installed (it is in the extra bench)")
        ways.remove(way)
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        torch.multiprocessing.spawn(rank_process, (folder, arguments.cases, ways, arguments.repeats), RANKS)


if __name__ == "__main__":
    main()
