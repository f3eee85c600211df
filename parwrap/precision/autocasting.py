"""Autocast around the user's code, disabled during a backward or an optimizer's step, and while a loader draws.

Torch's cache of cast weights is disabled, because it is only cleared when the outermost autocast ends. A whole training loop runs inside
this one, so it would use the weights of the first step throughout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from parwrap.coordination.call_site import location
from parwrap.data.passes import Pass
from parwrap.intercept.backward import Backward
from parwrap.intercept.interceptor import Interceptor, intercepts
from parwrap.intercept.skipping import steps_running
from parwrap.precision.user_managed import stand_aside, warn_once
from parwrap.torch_private.amp import autocast_enabled

__all__ = ["Autocasting"]


class Autocasting(Interceptor):
    """The interceptor that disables autocast outside of forward passes.

    It re-enables only what it has disabled, because there may be other autocasts inside or around it.

    Args:
        device: the type of device.
        dtype: the dtype to cast to; ``None`` for no autocast.
    """

    def __init__(self, device: str, dtype: torch.dtype | None) -> None:
        self._device, self._dtype = device, dtype
        self._depth, self._before = 0, False
        self._user_managed = dtype is None
        self._noted = False
        self._watching = ExitStack()

    @contextmanager
    def around(self) -> Iterator[None]:
        """The autocast context. Without a dtype, it disables the autocast of an outer scope."""
        autocast = torch.autocast(self._device, self._dtype or torch.bfloat16, enabled=self._dtype is not None, cache_enabled=False)
        with autocast, self._watching:
            yield

    @intercepts
    def iterate(self, loader: DataLoader, original: Callable[[DataLoader], Iterator]) -> Iterator:
        """Read batches with autocast disabled, in worker processes too, because hand-written autocast covers only the forward pass."""
        with self.off_for_data():
            return _Drawn(original(loader), self)

    iterate_pipelines = iterate

    def off_for_data(self) -> AbstractContextManager:
        """Disable autocast while data is drawn. A script's own autocast is unchanged."""
        return nullcontext() if self._user_managed else self._off()

    @intercepts
    def backward(self, call: Backward) -> None:
        if self._depth:
            self._on_again()  # a step that raised an error did not report its end
        with self._off():
            call.run()

    @intercepts
    def step(self, optimizer: Optimizer) -> None:
        """Disable autocast when a step begins. The step may contain the step of a base class or of another optimizer."""
        if not self._depth:
            self._before = torch.is_autocast_enabled(self._device)
            torch.set_autocast_enabled(self._device, False)
            if self._before:
                self._watch()
        self._depth += 1

    @intercepts
    def stepped(self, optimizer: Optimizer) -> None:
        if self._depth == 1:
            self._on_again()
        elif self._depth:
            self._depth -= 1

    @intercepts
    def closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Enable autocast in a closure, because it contains a forward pass."""

        def with_autocast() -> Any:
            depth = self._depth
            self._on_again()
            loss = closure()  # if it raises, the step has ended
            self._depth = depth
            torch.set_autocast_enabled(self._device, False)
            if self._before:
                self._watch()
            return loss

        return with_autocast

    @intercepts
    def enter_autocast(self, instance: torch.autocast) -> None:
        """Disable this autocast for good when the script enters its own."""
        if autocast_enabled(instance) and instance.device == self._device and not self._user_managed:
            self._user_managed, self._before = True, False
            torch.set_autocast_enabled(self._device, False)
            stand_aside("torch.autocast", "it casts nothing itself here")
        elif not (autocast_enabled(instance) or self._user_managed or self._noted) and instance.device == self._device:
            self._noted = True
            warn_once(
                f"torch.autocast(enabled=False) at {location()} keeps that part in float32. If it belongs to the script's own option for "
                "mixed precision, turn on that option instead of parwrap.amp, or remove it."
            )

    def _watch(self) -> None:
        """Check that a step is really running when a module is called, because a step that raises an error does not report its end."""

        def before_forward(module: torch.nn.Module, args: tuple) -> None:
            if not steps_running():
                self._on_again()

        self._watching.callback(register_module_forward_pre_hook(before_forward).remove)

    def _on_again(self) -> None:
        self._watching.close()
        self._depth = 0
        if self._before:
            torch.set_autocast_enabled(self._device, True)

    @contextmanager
    def _off(self) -> Iterator[None]:
        before, user_managed = torch.is_autocast_enabled(self._device), self._user_managed
        torch.set_autocast_enabled(self._device, False)
        try:
            yield
        finally:
            if before and user_managed == self._user_managed:
                torch.set_autocast_enabled(self._device, True)


class _Drawn(Pass):
    """Iterates over a loader with autocast disabled while batches are drawn."""

    def __init__(self, batches: Iterator, casting: Autocasting) -> None:
        super().__init__(batches, lambda exhausted: None)
        self._casting = casting

    def __next__(self) -> Any:
        with self._casting.off_for_data():
            return super().__next__()

    def last(self) -> bool:
        with self._casting.off_for_data():
            return super().last()
