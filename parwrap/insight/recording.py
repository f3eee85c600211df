"""Runs a script and records each step of its optimizers for ``parwrap verify``, or how long the steps take for ``parwrap scaling``.

``parwrap run ... -m parwrap.insight.recording SETTINGS train.py ARGS`` does so on every rank, and rank 0 writes the numbers of all ranks.
On one process, parwrap does nothing else to the script. Whatever the script writes goes to scratch.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch
from torch import nn
from torch.backends import cudnn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from parwrap.data.samplers import samples_in
from parwrap.decorators.distributed import open_passes
from parwrap.insight.printed import Printed, printed_in, prints_recorded
from parwrap.intercept.intercepted_calls import Backward, Batches
from parwrap.intercept.interceptor import Interceptor
from parwrap.intercept.patch import Patch, installed
from parwrap.intercept.torch_calls import intercepting
from parwrap.launching.script import run_exit_handlers, run_target
from parwrap.loop.optimizers import parameters_of
from parwrap.loop.random_streams import RandomStreams, get_states, seed_all
from parwrap.places import script_place
from parwrap.rank_zero.files import files_in_scratch
from parwrap.rank_zero.path_rules import passing
from parwrap.ranks.collectives import barrier, gathered, group_for, summed
from parwrap.ranks.device import gpu_count
from parwrap.ranks.group import rank, world_size
from parwrap.strategies.ddp_averager import TORCHS_BACKWARD
from parwrap.torch_private.amp import autocast_enabled

__all__ = ["PRECISELY", "WARM_UP", "Enough", "Recorded", "Settings", "Step", "recorded", "recorded_in", "stride"]

MOST_VALUES = 65_536
"""The most values of a tensor that are kept. Of a larger tensor, every k-th value is kept."""

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
BATCH_NORMS = "batch_norms"
"""The file whose presence says that a run has had a batch norm in train mode."""

HALF, HALVES = "half", (torch.float16, torch.bfloat16)
"""The file whose presence says that a run has computed in half precision, and the dtypes that are half precision."""

PRECISELY = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVIDIA_TF32_OVERRIDE": "0"}
"""Variables that make a GPU multiply float32 numbers without rounding them to TF32, and cuBLAS add in the same order each time."""

END = "end.json"
"""The file that says where a run has ended: as ``Settings.end``."""

MOST_SECONDS = 30
"""How long a run may go on after the last step that is recorded, to the end of the epoch."""

WARM_UP = 5
"""The number of steps at the beginning of a run that are not timed."""

DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


@dataclass
class Settings:
    """How to run a script.

    Attributes:
        folder: where to write the steps.
        steps: the number of steps after which the script is ended; if ``timed``, the number after the warm-up.
        seed: the seed of torch, numpy and Python, for scripts that set none.
        dropout: whether dropout is on.
        is_module: whether the script is named as a module.
        by_hand: whether gradients are averaged by torch's DDP, as in a script that wraps its model by hand, and not by parwrap.
        timed: whether the run records only how long the steps after the warm-up take, and how many samples they train on.
        prints: whether to record what the script prints, too. The script goes on after the last step that is recorded, to the end of the
            epoch.
        end: where it ends then, as the run before it has: after so many steps, and after so many more batches if there is a second
            number. Empty in the first run, which goes on for up to ``MOST_SECONDS``.
    """

    folder: str
    steps: int = 20
    seed: int = 0
    dropout: bool = True
    is_module: bool = False
    by_hand: bool = False
    timed: bool = False
    prints: bool = False
    end: list[int] = field(default_factory=list)


@dataclass
class Step:
    """One step of an optimizer.

    Attributes:
        place: the line that steps.
        number: the number of the optimizer, in the order in which optimizers take their first step.
        optimizer: the name of its class.
        options: for each of its parameter groups, the options that are numbers or texts.
        names: the names of its parameters.
        sizes: the number of values in each parameter.
        before: the parameters before this step, if it is the optimizer's first or the first with other parameters; otherwise empty.
        grads: the gradients of its parameters; ``None`` where there is none. Large tensors are sampled, as :func:`stride` says.
        after: the parameters after the step, sampled in the same way.
        passes: the number of passes over loaders that have begun.
        read: the number of batches that have been read since the step before.
        batches: the number of these batches that backwards have trained on.
        samples: the number of samples in the batches trained on, on all ranks.
        data: the sum and the sum of squares of all finite numbers in these samples.
        draws_reading: whether reading a batch has drawn random numbers in the process of a rank.
        draws_training: whether anything between a batch and its backwards has drawn random numbers on a rank.
    """

    place: str
    number: int
    optimizer: str
    options: list[dict[str, Any]]
    names: list[str]
    sizes: list[int]
    before: list[torch.Tensor]
    grads: list[torch.Tensor | None]
    after: list[torch.Tensor] = field(default_factory=list)
    passes: int = 0
    read: int = 0
    batches: int = 0
    samples: int = 0
    data: list[float] = field(default_factory=lambda: [0.0, 0.0])
    draws_reading: bool = False
    draws_training: bool = False


class Steps(Sequence[Step]):
    """The steps that a run has recorded in a folder; each is read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._files = sorted(folder.glob("step-*.pt"))

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: Any) -> Any:
        return Step(**torch.load(self._files[index], weights_only=True))


@dataclass
class Recorded:
    """What a run has recorded.

    Attributes:
        steps: its steps.
        batch_norms: whether a batch norm was in train mode in a recorded step.
        half: whether it has computed in half precision: an autocast was on, or a module has returned a tensor in half precision.
        failed: whether the run has ended with an error.
        printed: the lines that it has printed.
        end: where it has ended, as in :class:`Settings`.
    """

    steps: Sequence[Step]
    batch_norms: bool = False
    half: bool = False
    failed: bool = False
    printed: list[Printed] = field(default_factory=list)
    end: list[int] = field(default_factory=list)


class Enough(SystemExit):
    """Ends the script after the last step that is recorded."""


def recorded_in(folder: Path, failed: bool = False) -> Recorded:
    """What a run has recorded in ``folder``; ``failed`` says whether the run ended with an error."""
    end = json.loads((folder / END).read_text()) if (folder / END).exists() else []
    return Recorded(Steps(folder), (folder / BATCH_NORMS).exists(), (folder / HALF).exists(), failed, printed_in(folder), end)


@contextmanager
def recorded(settings: Settings) -> Iterator[None]:
    """Record the steps inside the block, and end it by :class:`Enough` after the last one to record.

    A single process is also seeded here, and writes to scratch. On several ranks, their scope has done both.
    """
    timer = _Timer(settings) if settings.timed else None
    recorder = _Recorder(settings)
    interceptors: list[Interceptor] = [timer or recorder]
    with ExitStack() as around:
        if settings.prints:
            around.callback(recorder.close)
        if settings.by_hand:
            interceptors.append(_ByHand())
        if world_size() == 1:
            interceptors.append(RandomStreams(0))  # generators without a seed get one, as on ranks
            seed_all(settings.seed)
            folder = tempfile.mkdtemp(prefix="parwrap-")  # a TemporaryDirectory is removed by the exit handlers that run in this scope
            around.callback(shutil.rmtree, folder, ignore_errors=True)
            around.enter_context(files_in_scratch(Path(folder)))
        around.enter_context(nullcontext() if settings.timed else _sums_in_one_order())
        around.enter_context(intercepting(interceptors, "__main__"))
        around.enter_context(installed([] if settings.dropout else _no_dropout()))
        if settings.prints and rank() == 0:
            around.enter_context(prints_recorded(Path(settings.folder)))
        yield
        if timer is not None:
            timer.end()


@contextmanager
def _sums_in_one_order() -> Iterator[None]:
    """Inside the block, kernels of a GPU add numbers in the same order in each run; by default, some do not."""
    if not gpu_count():
        yield
        return
    before = cudnn.deterministic, torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn.deterministic = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        cudnn.deterministic = before[0]
        torch.use_deterministic_algorithms(before[1], warn_only=before[2])


def stride(size: int) -> int:
    """The distance between kept values of a tensor with ``size`` values; odd, so that values of all columns of a matrix are kept.

    >>> stride(10), stride(1_048_576)
    (1, 17)
    """
    return -(-size // MOST_VALUES) | 1


@dataclass
class _Batch:
    """A batch that no backward has trained on yet.

    Attributes:
        samples: the number of its samples.
        data: as in :class:`Step`.
        drew: whether reading it has drawn random numbers.
    """

    samples: int
    data: tuple[float, float]
    drew: bool


class _Recorder(Interceptor):
    """Writes each step of an optimizer into a file."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._steps = self._passes = 0
        self._numbers: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._next_number = itertools.count()
        self._known: dict[int, tuple[list[int], list[str]]] = {}  # sizes and names of the parameters of each optimizer
        self._modules: WeakSet[nn.Module] = WeakSet()
        self._batch: _Batch | None = None
        self._draws: Any = None  # where the streams were after the last batch or backward
        self._step: Step | None = None
        self._half = False
        self._recorded_all = 0.0  # the time of the last step that is recorded
        self._epoch = self._further = 0  # the number of passes by then, and of batches since the last step
        self._ended = self._stepping = False
        self._begin()

    def _begin(self) -> None:
        self._read, self._batches, self._samples, self._data = 0, 0, 0, [0.0, 0.0]
        self._drew_reading = self._drew_training = False

    def call(self, module: nn.Module, args: tuple, kwargs: dict, original: Callable) -> Any:
        outputs = original(*args, **kwargs)
        if self._recorded_all:
            return outputs
        self._modules.add(module)
        self._half = self._half or any(each.dtype in HALVES for each in _tensors(outputs))
        return outputs

    def enter_autocast(self, instance: torch.autocast) -> None:
        self._half |= autocast_enabled(instance)

    def iterate(self, loader: DataLoader, original: Callable[[DataLoader], Iterator]) -> Iterator:
        self._end_if_done()
        self._passes += 1
        return _Noted(original(loader), self._drawn, _state_of_reading)

    def _drawn(self, batch: Any, drew: bool) -> None:
        self._end_if_done()
        if self._recorded_all:
            self._further += 1
            return
        self._read += 1
        values = [each.detach().double().nan_to_num(0, 0, 0) for each in _tensors(batch)]
        data = sum(float(each.sum()) for each in values), sum(float(each.square().sum()) for each in values)
        self._batch = _Batch(samples_in(batch), data, drew)
        self._draws = _state_of_draws()

    def backward(self, call: Backward) -> None:
        if self._recorded_all:
            call.run()
            return
        self._half |= torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")  # that of a decorator is on in its function
        if (batch := self._batch) is not None:
            self._batch = None
            self._batches += 1
            self._samples += batch.samples
            self._data = [a + b for a, b in zip(self._data, batch.data, strict=True)]
            self._drew_reading |= batch.drew
        if self._draws is not None:
            now = _state_of_draws()
            self._drew_training |= self._draws.set == now.set and self._draws != now  # another set of streams is no draw
        call.run()
        self._draws = self._draws and _state_of_draws()

    def step(self, optimizer: Optimizer) -> None:
        self._end_if_done(at_step=True)
        self._stepping = True
        if self._recorded_all:
            return
        parameters = list(parameters_of(optimizer))
        if optimizer not in self._numbers:
            self._numbers[optimizer] = next(self._next_number)
        number, sizes = self._numbers[optimizer], [p.numel() for p in parameters]
        if begins := number not in self._known or self._known[number][0] != sizes:
            self._known[number] = sizes, self._names(parameters)
        self._step = Step(
            str(script_place()),
            number,
            type(optimizer).__name__,
            [{name: value for name, value in group.items() if isinstance(value, (int, float, str))} for group in optimizer.param_groups],
            self._known[number][1],
            sizes,
            [_sampled(p) for p in parameters] if begins else [],
            [None if p.grad is None else _sampled(p.grad) for p in parameters],
        )

    def stepped(self, optimizer: Optimizer) -> None:
        if not self._stepping:  # an inner step, of a base class or of another optimizer, is recorded in its place
            return
        self._stepping = False
        self._steps, self._further = self._steps + 1, 0
        if (step := self._step) is None:
            return
        self._step = None
        step.after = [_sampled(p) for p in parameters_of(optimizer)]
        mine = [self._samples, *self._data, int(self._drew_reading), int(self._drew_training)]
        step.samples, *step.data, reading, training = summed("reduce_sum", mine, group_for("reduce_sum"))
        step.passes, step.read, step.batches = self._passes, self._read, self._batches
        step.draws_reading, step.draws_training = reading > 0, training > 0
        self._begin()
        if rank() == 0:
            folder = Path(self._settings.folder)
            with passing():
                torch.save(vars(step), folder / f"step-{self._steps:06}.pt")
                if any(isinstance(each, NORMS) and each.training for each in self._modules):
                    (folder / BATCH_NORMS).touch()
                if self._half:
                    (folder / HALF).touch()
        if self._steps == self._settings.steps and self._settings.prints:
            self._recorded_all, self._epoch = time.perf_counter(), self._passes
        self._end_if_done()

    def _end_if_done(self, at_step: bool = False) -> None:
        """End the script if all steps are recorded; if it has caught :class:`Enough`, end it again.

        To record what it prints, it goes on to the next step, and if loaders are read, to the first step of another pass.
        """
        if self._steps < self._settings.steps:
            return
        if self._settings.prints and not self._ended:
            end = self._settings.end
            if end:
                self._ended = [self._steps, self._further] >= end if len(end) > 1 else at_step and self._steps >= end[0]
            else:
                late = time.perf_counter() - self._recorded_all > MOST_SECONDS
                self._ended = late or (at_step and (not self._passes or self._passes > self._epoch))
                if self._ended:
                    self._write_end([] if at_step else [self._further])
            if not self._ended:
                return
        raise Enough(0)

    def _write_end(self, further: Sequence[int] = ()) -> None:
        with passing():
            Path(self._settings.folder, END).write_text(json.dumps([self._steps, *further]))

    def close(self) -> None:
        """The script has ended."""
        if rank() == 0 and not self._ended:
            self._write_end()

    def _names(self, parameters: Iterable[torch.Tensor]) -> list[str]:
        """The longest name of each of ``parameters`` in the modules that have been called; without one, its position in ``parameters``."""
        names: dict[int, str] = {}
        for module in list(self._modules):
            for name, p in module.named_parameters(remove_duplicate=False):
                names[id(p)] = max(names.get(id(p), ""), name.removeprefix("module."), key=len)
        return [names.get(id(p), f"parameter {number}") for number, p in enumerate(parameters)]


class _Timer(Interceptor):
    """Writes how long each step after the warm-up has taken on the slowest rank, and how many samples all ranks have trained on."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._steps = self._samples = self._batch = 0
        self._last = 0.0
        self._times: list[float] = []

    def iterate(self, loader: DataLoader, original: Callable[[DataLoader], Iterator]) -> Iterator:
        return _Noted(original(loader), self._drawn, lambda: None)

    def _drawn(self, batch: Any, drew: bool) -> None:
        self._batch = samples_in(batch)

    def backward(self, call: Backward) -> None:
        self._samples, self._batch = self._samples + self._batch, 0
        call.run()

    def stepped(self, optimizer: Optimizer) -> None:
        self._steps += 1
        if self._steps <= WARM_UP:
            if self._steps == WARM_UP:
                barrier()
                self._samples, self._last = 0, time.perf_counter()
            return
        now = time.perf_counter()
        self._times.append(now - self._last)
        self._last = now
        if self._steps >= WARM_UP + self._settings.steps:
            self.end()
            raise Enough(0)

    def end(self) -> None:
        """Write how long the steps after the warm-up took, if there were any."""
        if self._times:
            timed = {
                "times": max(gathered(self._times, group_for("gather")), key=sum),
                "samples": summed("reduce_sum", self._samples, group_for("reduce_sum")),
            }
            if rank() == 0:
                with passing():
                    Path(self._settings.folder, "timed.json").write_text(json.dumps(timed))


class _Noted(Batches):
    """Reports each batch, and whether reading the batch has drawn random numbers.

    For the first batch it reports that nothing was drawn, because the order of the samples is drawn with it.
    """

    def __init__(self, batches: Iterator, drawn: Callable[[Any, bool], None], state: Callable[[], Any]) -> None:
        super().__init__(batches)
        self._drawn, self._state, self._first = drawn, state, True

    def __next__(self) -> Any:
        before = self._state()
        batch = super().__next__()
        drew, self._first = not self._first and before != self._state(), False
        self._drawn(batch, drew)
        return batch


class _Draws(NamedTuple):
    """The states of the random streams of torch and numpy, and the libraries that draw on this rank's own streams."""

    set: frozenset[str]
    states: tuple[Any, ...]


def _state_of_draws() -> _Draws:
    passes = open_passes()
    cpu, numpys, _, gpu = get_states()
    states = cpu.numpy().tobytes(), numpys[1].tobytes(), numpys[2:], None if gpu is None else gpu.numpy().tobytes()
    return _Draws(frozenset() if passes is None else passes.streams.own, states)


def _state_of_reading() -> Any:
    """As :func:`_state_of_draws`, with Python's ``random``, from which augmentation may draw too."""
    return _state_of_draws().states, random.getstate()


def _tensors(batch: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """The tensors in a batch, also in arrays and in attributes of objects."""
    seen = set() if seen is None else seen
    if id(batch) in seen:
        return
    seen.add(id(batch))
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, np.ndarray):
        if batch.dtype.kind in "biuf":
            yield torch.from_numpy(np.ascontiguousarray(batch).astype(np.float64))
    elif isinstance(batch, Mapping):
        for each in batch.values():
            yield from _tensors(each, seen)
    elif isinstance(batch, (list, tuple)):
        for each in batch:
            yield from _tensors(each, seen)
    elif hasattr(batch, "__dict__"):
        yield from _tensors(vars(batch), seen)


@torch.no_grad()
def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    """The values of ``tensor``, or of a large one those at each :func:`stride`, as a flat float32 or float64 tensor of the CPU."""
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.to_dense() if tensor.is_sparse else tensor
    real = torch.view_as_real(whole.detach()) if whole.is_complex() else whole.detach()
    step = stride(whole.numel())
    flat = real.reshape(-1, 2)[::step].reshape(-1) if whole.is_complex() else real.reshape(-1)[::step]
    return flat.to("cpu", torch.promote_types(flat.dtype, torch.float32), copy=True)


class _HandWritten(DistributedDataParallel):
    """A subclass of torch's class, because parwrap stands aside where that class itself is built, but not for a subclass."""


class _ByHand(Interceptor):
    """Averages gradients with torch's ``DistributedDataParallel``, as a script that wraps its model, in place of parwrap's averaging.

    It wraps each module that is called from outside any other module. What the ranks read and draw is the same as with parwrap.
    """

    def __init__(self) -> None:
        self._wrapped: dict[nn.Module, _HandWritten] = {}
        self._inside = False

    def call(self, module: nn.Module, args: tuple, kwargs: dict, original: Callable) -> Any:
        if self._inside or not (torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())):
            return original(*args, **kwargs)
        self._inside = True
        try:
            if module not in self._wrapped:
                self._wrapped[module] = _HandWritten(module, find_unused_parameters=True)
            return self._wrapped[module](*args, **kwargs)
        finally:
            self._inside = False

    def backward(self, call: Backward) -> None:
        TORCHS_BACKWARD(cast(Any, call.tensors), call.grad_tensors, **call.options)
        if (passes := open_passes()) is not None:
            passes.ran_backward()


def _no_dropout() -> list[Patch]:
    def unchanged(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> torch.Tensor:
        return args[0] if args else kwargs["input"]

    def attention(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> torch.Tensor:
        without = {name: value for name, value in kwargs.items() if name != "dropout_p"}
        return wrapped(*args[:4], *([0.0] if len(args) > 4 else []), *args[5:], **without)

    def recurrent(wrapped: Callable, instance: nn.RNNBase, args: tuple, kwargs: dict) -> Any:
        instance.dropout = 0.0
        return wrapped(*args, **kwargs)

    return [
        *(Patch(functional, name, unchanged) for name in DROPOUTS),
        Patch(torch, "dropout", unchanged),
        Patch(functional, "scaled_dot_product_attention", attention),
        *(Patch(kind, "forward", recurrent) for kind in (nn.RNN, nn.LSTM, nn.GRU)),
    ]


def main() -> None:
    """Run and record the script of this process's command line."""
    settings = Settings(**json.loads(sys.argv[1]))
    del sys.argv[:2]
    with recorded(settings):
        try:
            run_target("module" if settings.is_module else "file", sys.argv[0])
        finally:
            run_exit_handlers()  # also of a script that fails: they may write files


if __name__ == "__main__":
    main()
