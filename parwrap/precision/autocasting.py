"""Autocast around the user's code, off while a backward or an optimizer's step runs, and while a loader draws.

torch's cache of cast weights is off: it is emptied only when the outermost autocast ends, and a whole training loop is inside this
one, so weights would be those of the first step for ever.
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
from parwrap.precision.aside import stand_aside, warn_once
from parwrap.torch_private.amp import autocast_enabled

__all__ = ["Autocasting"]


class Autocasting(Interceptor):
    """The interceptor that keeps autocast out of what is not a forward.

    It switches on again only what it has switched off itself: there may be another inside it, or around it.

    Args:
        device: the type of device.
        dtype: to cast to; ``None`` for no autocast.
    """

    def __init__(self, device: str, dtype: torch.dtype | None) -> None:
        self._device, self._dtype = device, dtype
        self._depth, self._before = 0, False
        self._aside = dtype is None
        self._noted = False
        self._watching = ExitStack()

    @contextmanager
    def around(self) -> Iterator[None]:
        """Autocast itself; without a dtype, what it is in an autocast of another scope is switched off."""
        autocast = torch.autocast(self._device, self._dtype or torch.bfloat16, enabled=self._dtype is not None, cache_enabled=False)
        with autocast, self._watching:
            yield

    @intercepts
    def iterate(self, loader: DataLoader, original: Callable[[DataLoader], Iterator]) -> Iterator:
        """By hand, autocast would be around the forward only: samples are made without, in worker processes too."""
        with self.off_for_data():
            return _Drawn(original(loader), self)

    iterate_pipelines = iterate

    def off_for_data(self) -> AbstractContextManager:
        """While data is drawn; a script's own autocast is as its authors had it."""
        return nullcontext() if self._aside else self._off()

    @intercepts
    def backward(self, call: Backward) -> None:
        if self._depth:
            self._on_again()  # a step has raised, so it was not seen to end
        with self._off():
            call.run()

    @intercepts
    def step(self, optimizer: Optimizer) -> None:
        """A step begins; inside it, there may be the step of a base class or of another optimizer."""
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
        """In a closure is a forward."""

        def with_autocast() -> Any:
            depth = self._depth
            self._on_again()
            loss = closure()  # if it raises, the step is over
            self._depth = depth
            torch.set_autocast_enabled(self._device, False)
            if self._before:
                self._watch()
            return loss

        return with_autocast

    @intercepts
    def enter_autocast(self, instance: torch.autocast) -> None:
        """The script enters an autocast of its own: this one is off from then on, as the script's authors had it."""
        if autocast_enabled(instance) and instance.device == self._device and not self._aside:
            self._aside, self._before = True, False
            torch.set_autocast_enabled(self._device, False)
            stand_aside("torch.autocast", "it casts nothing itself here")
        elif not (autocast_enabled(instance) or self._aside or self._noted) and instance.device == self._device:
            self._noted = True
            warn_once(
                f"torch.autocast(enabled=False) at {location()} keeps that part in float32. If the script has a switch for mixed "
                "precision of its own there, switch it on instead of parwrap.amp, or take it out."
            )

    def _watch(self) -> None:
        """A step that raises is not seen to end, so if a module is called there must be a step around it."""

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
        before, aside = torch.is_autocast_enabled(self._device), self._aside
        torch.set_autocast_enabled(self._device, False)
        try:
            yield
        finally:
            if before and aside == self._aside:
                torch.set_autocast_enabled(self._device, True)


class _Drawn(Pass):
    """A pass whose batches are drawn without autocast."""

    def __init__(self, batches: Iterator, casting: Autocasting) -> None:
        super().__init__(batches, lambda exhausted: None)
        self._casting = casting

    def __next__(self) -> Any:
        with self._casting.off_for_data():
            return super().__next__()

    def last(self) -> bool:
        with self._casting.off_for_data():
            return super().last()
