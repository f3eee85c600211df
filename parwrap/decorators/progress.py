"""``@progress``: a bar on rank 0's terminal for a loop without one: epoch, batches, samples per second of all ranks, loss, time left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from operator import length_hint
from types import FrameType
from typing import Any, cast

import torch
from torch.utils.data import DataLoader

from parwrap.data.samplers import samples_in
from parwrap.decorators.distributed import open_passes
from parwrap.decorators.scope import Call, ScopeDecorator, module_of
from parwrap.errors import UsageError
from parwrap.intercept.intercepted_calls import Backward, Batches
from parwrap.intercept.interceptor import Interceptor
from parwrap.intercept.torch_calls import intercepting
from parwrap.places import is_ours
from parwrap.ranks.group import rank, world_size

__all__ = ["progress"]

BARS = ("tqdm", "rich", "fastprogress", "lightning_utilities")
"""Packages with bars that a script puts around a loader."""

EVERY = 0.5
"""Seconds between two readings of the loss: each waits for the GPU."""


class progress(ScopeDecorator):
    """Show a tqdm bar for each training pass over a loader.

    Write ``@progress`` or ``with progress():``; for a script, ``--progress``. The bar is rank 0's, on stderr. There is none if stderr is
    not a terminal, or if the script has a bar of its own around the loader. On one rank, a pass counts as training if gradients are on.

    Raises:
        UsageError: tqdm is not installed.

    >>> with progress():
    ...     pass
    """

    layer = 90

    def __init__(self) -> None:
        if find_spec("tqdm") is None:
            raise UsageError("progress shows a bar of tqdm, which is not installed: pip install 'parwrap[progress]'.")

    def scope(self, call: Call) -> AbstractContextManager[Any]:
        if rank() > 0 or sys.stderr is None or not sys.stderr.isatty():
            return nullcontext()
        return intercepting([_Bars()], module_of(call.function))


class _Bars(Interceptor):
    """Shows a bar for each pass that trains.

    Attributes:
        epochs: how many bars were shown.
    """

    def __init__(self) -> None:
        self.epochs = 0
        self._loss: torch.Tensor | None = None

    def iterate(self, loader: DataLoader, original: Callable[[DataLoader], Iterator]) -> Iterator:
        batches = original(loader)
        return batches if _has_own_bar(sys._getframe(1)) else _Shown(batches, loader, self)

    def backward(self, call: Backward) -> None:
        call.run()
        root = call.given[0]
        self._loss = root if isinstance(root, torch.Tensor) and root.numel() == 1 else None

    def postfix(self, rate: float) -> str:
        """The loss and the samples per second, as the bar shows them."""
        loss = "" if self._loss is None else f"loss {self._loss.item():.4g}, "
        return f"{loss}{rate:,.0f} samples/s"


class _Shown(Batches):
    """Shows a bar with its first batch if the pass trains; a batch counts once the script asks for the next."""

    def __init__(self, batches: Iterator, loader: DataLoader, bars: _Bars) -> None:
        super().__init__(batches)
        self._loader, self._bars, self._bar = loader, bars, cast(Any, None)
        self._is_first, self._samples, self._size, self._begin, self._looked = True, 0, 0, time.perf_counter(), 0.0

    def __next__(self) -> Any:
        if self._bar is not None:
            self._count()
        try:
            batch = super().__next__()
        except StopIteration:
            if self._bar is not None:
                self._bar.set_postfix_str(self._bars.postfix(self._samples / (time.perf_counter() - self._begin)))
                self._bar.close()
                self._bar = None
            raise
        if self._is_first and _trains():
            from tqdm import tqdm

            self._bars.epochs += 1
            total, epoch = length_hint(self._loader) or None, f"epoch {self._bars.epochs}"
            self._bar = tqdm(total=total, desc=epoch, unit="batch", leave=True, file=sys.stderr)
        self._is_first, self._size = False, samples_in(batch) * world_size()
        return batch

    def _count(self) -> None:
        self._samples += self._size
        if time.perf_counter() - self._looked > EVERY:
            self._looked = time.perf_counter()
            self._bar.set_postfix_str(self._bars.postfix(self._samples / (self._looked - self._begin)), refresh=False)
        self._bar.update()

    def __del__(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _trains() -> bool:
    """Whether the pass that has just begun trains; on one rank, whether gradients are on."""
    passes = open_passes()
    if passes is None:
        return torch.is_grad_enabled()
    return passes.innermost is not None and passes.innermost.trains


def _has_own_bar(frame: FrameType | None) -> bool:
    """Whether the innermost frame that is not torch's or parwrap's belongs to a package of bars."""
    while frame is not None and is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in BARS
