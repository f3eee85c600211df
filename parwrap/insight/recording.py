"""Runs a script and records each step of its optimizers: what ``parwrap verify`` compares between one process and several ranks.

``parwrap run ... -m parwrap.insight.recording SETTINGS train.py ARGS`` runs it so on every rank; the numbers of all ranks are rank 0's to
write. On one process nothing else of parwrap is around the script. Whatever the script writes goes to scratch.
"""

from __future__ import annotations

import json
import random
import runpy
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.module import register_module_module_registration_hook, register_module_parameter_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from parwrap.decorators.distributed import open_passes
from parwrap.intercept.interceptor import Interceptor
from parwrap.intercept.patch import Patch, installed
from parwrap.intercept.torch_calls import Backward, intercepting
from parwrap.launching.script import run_file, running_exit_handlers
from parwrap.loop.optimizers import parameters_of
from parwrap.loop.random_streams import seed_all
from parwrap.places import script_place
from parwrap.rank_zero.files import files_in_scratch
from parwrap.rank_zero.path_rules import passing
from parwrap.ranks.collectives import barrier, gather, reduce_sum
from parwrap.ranks.group import rank, world_size
from parwrap.strategies.ddp_averager import TORCHS_BACKWARD

__all__ = ["Enough", "Recorded", "Settings", "Step", "recorded", "recorded_in"]

MOST_VALUES = 65_536
"""The number of values of a tensor that are kept: every k-th of a larger one."""

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
WARM_UP = 5
"""The steps before a time is taken."""

DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


@dataclass
class Settings:
    """How to run a script.

    Attributes:
        folder: where to write the steps.
        steps: the number of steps after which the script is ended.
        seed: the seed of torch, numpy and Python, for scripts that set none.
        dropout: whether dropout is on.
        is_module: whether the script is named as a module.
        by_hand: whether torch's DDP averages the gradients on several ranks, driven by hand.
        timed: whether only the time and the samples of the steps are recorded, after a warm-up.
    """

    folder: str
    steps: int = 20
    seed: int = 0
    dropout: bool = True
    is_module: bool = False
    by_hand: bool = False
    timed: bool = False


@dataclass
class Step:
    """One step of an optimizer.

    Attributes:
        place: the line that steps.
        optimizer: the name of its class.
        options: the numbers and texts of each of its groups.
        names: the names of its parameters.
        before: their values before its first step; empty at later ones.
        grads: their gradients; ``None`` where there is none. Large tensors are sampled.
        after: their values after the step, likewise.
        passes: the number of passes over loaders that have begun.
        batches: the number of batches that backwards have trained on since the step before.
        samples: the number of samples in them, on all ranks.
        data: the sum and the sum of squares of all numbers in them.
        draws_reading: whether reading a batch has drawn random numbers in this process.
        draws_training: whether anything between a batch and its backwards has drawn random numbers.
    """

    place: str
    optimizer: str
    options: list[dict[str, Any]]
    names: list[str]
    before: list[torch.Tensor]
    grads: list[torch.Tensor | None]
    after: list[torch.Tensor] = field(default_factory=list)
    passes: int = 0
    batches: int = 0
    samples: int = 0
    data: list[float] = field(default_factory=lambda: [0.0, 0.0])
    draws_reading: bool = False
    draws_training: bool = False


@dataclass
class Recorded:
    """What a run has recorded.

    Attributes:
        steps: its steps.
        batch_norms: whether a batch norm was in train mode in them.
        failed: whether it has ended with an error.
    """

    steps: list[Step]
    batch_norms: bool = False
    failed: bool = False


class Enough(SystemExit):
    """Ends the script after the last step that is recorded."""


def recorded_in(folder: Path, failed: bool = False) -> Recorded:
    """What a run has recorded in ``folder``."""
    files = sorted(folder.glob("step-*.pt"))
    read = [torch.load(file, weights_only=True) for file in files]
    return Recorded([Step(**each["step"]) for each in read], any(each["batch_norms"] for each in read), failed)


@contextmanager
def recorded(settings: Settings, modules: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Record the steps inside the block, and end it with :class:`Enough`; ``modules`` were built before."""
    patches = [] if settings.dropout else _no_dropout()
    with _Names(modules) as names:
        recorder = _Timer(settings) if settings.timed else _Recorder(settings, names)
        interceptors = [recorder, *([_ByHand()] if settings.by_hand else [])]
        with intercepting(interceptors, "__main__"), installed(patches):
            yield


class _Names:
    """The names of parameters in ``modules``, and in those that are built inside the block."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules: WeakSet[nn.Module] = WeakSet(each for module in modules for each in module.modules())
        self._inner: WeakSet[nn.Module] = WeakSet(each for module in self._modules for each in module.children())

    def __enter__(self) -> _Names:
        self._hooks = [
            register_module_parameter_registration_hook(lambda module, name, parameter: self._modules.add(module)),
            register_module_module_registration_hook(self._has_inner),
        ]
        return self

    def __exit__(self, *exception: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    def _has_inner(self, module: nn.Module, name: str, inner: nn.Module | None) -> None:
        if isinstance(module, DistributedDataParallel):
            return
        self._modules.add(module)
        if inner is not None:
            self._inner.add(inner)

    def of(self, parameters: Iterable[torch.Tensor]) -> list[str]:
        """The names of ``parameters``: in the outermost module that holds them, else their places among them."""
        outer = [each for each in self._modules if each not in self._inner]
        names = {id(p): name for module in outer for name, p in module.named_parameters(remove_duplicate=False)}
        return [names.get(id(p), f"parameter {number}") for number, p in enumerate(parameters)]

    def have_batch_norms(self) -> bool:
        """Whether a batch norm is in train mode."""
        return any(isinstance(each, BATCH_NORMS) and each.training for each in self._modules)


@dataclass
class _Batch:
    samples: int
    data: tuple[float, float]
    drew: bool


class _Recorder(Interceptor):
    """Writes each step of an optimizer into a file."""

    def __init__(self, settings: Settings, names: _Names) -> None:
        self._settings, self._names = settings, names
        self._steps = self._passes = 0
        self._seen: WeakKeyDictionary[Optimizer, list[str]] = WeakKeyDictionary()
        self._batch: _Batch | None = None
        self._state: tuple[bytes, int] | None = None  # since the last batch or backward
        self._step: Step | None = None
        self._begin()

    def _begin(self) -> None:
        self._batches, self._samples, self._data, self._drew_reading, self._drew_training = 0, 0, [0.0, 0.0], False, False

    def iterate(self, loader: DataLoader, original: Callable[[DataLoader], Iterator]) -> Iterator:
        self._passes += 1
        return _Noted(original(loader), self._drawn)

    def _drawn(self, batch: Any, drew: bool) -> None:
        tensors = list(_tensors(batch))
        values = [each.detach().double() for each in tensors]
        data = sum(float(each.sum()) for each in values), sum(float(each.square().sum()) for each in values)
        self._batch = _Batch(next((len(each) for each in tensors if each.dim()), 1), data, drew)
        self._state = _random_state()

    def backward(self, call: Backward) -> None:
        if (batch := self._batch) is not None:
            self._batch = None
            self._batches += 1
            self._samples += batch.samples
            self._data = [a + b for a, b in zip(self._data, batch.data, strict=True)]
            self._drew_reading |= batch.drew
        self._drew_training |= self._state not in (None, _random_state())
        call.run()
        self._state = self._state and _random_state()

    def step(self, optimizer: Optimizer) -> None:
        parameters = list(parameters_of(optimizer))
        is_first = optimizer not in self._seen
        if is_first:
            self._seen[optimizer] = self._names.of(parameters)
        self._step = Step(
            str(script_place()),
            type(optimizer).__name__,
            [{name: value for name, value in group.items() if isinstance(value, (int, float, str))} for group in optimizer.param_groups],
            self._seen[optimizer],
            [_kept(p) for p in parameters] if is_first else [],
            [None if p.grad is None else _kept(p.grad) for p in parameters],
        )

    def stepped(self, optimizer: Optimizer) -> None:
        if self._steps == self._settings.steps:  # the script has caught the first one
            raise Enough(0)
        if self._step is None:  # the step of a base class, inside that of an optimizer
            return
        step, self._step = self._step, None
        step.after = [_kept(p) for p in parameters_of(optimizer)]
        mine = [self._samples, *self._data, int(self._drew_reading), int(self._drew_training)]
        step.samples, *step.data, reading, training = reduce_sum(mine)
        step.passes, step.batches = self._passes, self._batches
        step.draws_reading, step.draws_training = reading > 0, training > 0
        self._begin()
        self._steps += 1
        if rank() == 0:
            file = Path(self._settings.folder, f"step-{self._steps:06}.pt")
            with passing():
                torch.save({"step": vars(step), "batch_norms": self._names.have_batch_norms()}, file)
        if self._steps == self._settings.steps:
            raise Enough(0)


def _random_state() -> tuple[bytes, int]:
    """What changes with each draw of this process from torch or numpy."""
    numpys: Any = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), numpys[2]


def _state_of_draws() -> Any:
    """As :func:`_random_state`, with Python's ``random``, from which augmentation may draw too."""
    return _random_state(), random.getstate()


class _Timer(Interceptor):
    """Writes how long the steps after the warm-up have taken on the slowest rank, and how many samples all ranks have trained on."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._steps = self._samples = self._batch = 0
        self._begin = 0.0

    def iterate(self, loader: DataLoader, original: Callable[[DataLoader], Iterator]) -> Iterator:
        return _Noted(original(loader), self._drawn, lambda: None)

    def _drawn(self, batch: Any, drew: bool) -> None:
        self._batch = next((len(each) for each in _tensors(batch) if each.dim()), 1)

    def backward(self, call: Backward) -> None:
        self._samples, self._batch = self._samples + self._batch, 0
        call.run()

    def stepped(self, optimizer: Optimizer) -> None:
        self._steps += 1
        if self._steps == WARM_UP:
            barrier()
            self._samples, self._begin = 0, time.perf_counter()
        elif self._steps >= WARM_UP + self._settings.steps:
            seconds = max(gather(time.perf_counter() - self._begin))
            timed = {"seconds": seconds, "samples": reduce_sum(self._samples), "steps": self._steps - WARM_UP}
            if rank() == 0:
                with passing():
                    Path(self._settings.folder, "timed.json").write_text(json.dumps(timed))
            raise Enough(0)


class _Noted:
    """An iterator over a loader that tells of each batch, and whether the second or a later one was drawn with random numbers: the order
    of the samples is drawn with the first."""

    def __init__(self, batches: Iterator, drawn: Callable[[Any, bool], None], state: Callable[[], Any] = _state_of_draws) -> None:
        self._batches, self._drawn, self._state, self._first = batches, drawn, state, True

    def __iter__(self) -> _Noted:
        return self

    def __next__(self) -> Any:
        before = self._state()
        batch = next(self._batches)
        drew, self._first = not self._first and before != self._state(), False
        self._drawn(batch, drew)
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, dict):
        for each in batch.values():
            yield from _tensors(each)
    elif isinstance(batch, (list, tuple)):
        for each in batch:
            yield from _tensors(each)
    elif hasattr(batch, "__dict__"):  # a data class, or an object of a library
        yield from _tensors(vars(batch))


@torch.no_grad()
def _kept(tensor: torch.Tensor) -> torch.Tensor:
    """The values of ``tensor``, or of a large one every k-th, as a flat float32 or float64 tensor of the CPU."""
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.to_dense() if tensor.is_sparse else tensor
    flat = whole.detach().reshape(-1)
    return flat[:: -(-flat.numel() // MOST_VALUES) or 1].to("cpu", torch.promote_types(flat.dtype, torch.float32), copy=True)


class _HandWritten(DistributedDataParallel):
    """A subclass, because a script's own ``DistributedDataParallel`` makes parwrap stand aside."""


class _ByHand(Interceptor):
    """Drives torch's ``DistributedDataParallel`` as a script would that wraps its model: in place of parwrap's own averaging.

    The outermost module that is called is wrapped; what the ranks read and draw is as with parwrap.
    """

    def __init__(self) -> None:
        self._wrapped: WeakKeyDictionary[nn.Module, list[DistributedDataParallel]] = WeakKeyDictionary()
        self._inside = False

    def call(self, module: nn.Module, args: tuple, kwargs: dict, original: Callable) -> Any:
        if self._inside or not (torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())):
            return original(*args, **kwargs)
        self._inside = True
        try:
            if module not in self._wrapped:
                self._wrapped[module] = [_HandWritten(module, find_unused_parameters=True)]
            return self._wrapped[module][0](*args, **kwargs)
        finally:
            self._inside = False

    def backward(self, call: Backward) -> None:
        TORCHS_BACKWARD(cast(Any, call.tensors), call.grad_tensors, **call.options)
        if (passes := open_passes()) is not None:
            passes.ran_backward()


def _no_dropout() -> list[Patch]:
    def kept(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> torch.Tensor:
        return args[0] if args else kwargs["input"]

    def attention(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> torch.Tensor:
        without = {name: value for name, value in kwargs.items() if name != "dropout_p"}
        return wrapped(*args[:4], *([0.0] if len(args) > 4 else []), *args[5:], **without)

    def recurrent(wrapped: Callable, instance: nn.RNNBase, args: tuple, kwargs: dict) -> Any:
        instance.dropout = 0.0
        return wrapped(*args, **kwargs)

    return [
        *(Patch(functional, name, kept) for name in DROPOUTS),
        Patch(torch, "dropout", kept),
        Patch(functional, "scaled_dot_product_attention", attention),
        *(Patch(kind, "forward", recurrent) for kind in (nn.RNN, nn.LSTM, nn.GRU)),
    ]


def main() -> None:
    """Run the script of this process's command line."""
    settings = Settings(**json.loads(sys.argv[1]))
    del sys.argv[:2]
    if world_size() == 1:
        seed_all(settings.seed)
        with tempfile.TemporaryDirectory(prefix="parwrap-") as folder, files_in_scratch(Path(folder)):
            _run(settings)
    else:
        _run(settings)


def _run(settings: Settings) -> None:
    with recorded(settings), running_exit_handlers():
        if settings.is_module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            run_file(sys.argv[0])


if __name__ == "__main__":
    main()
