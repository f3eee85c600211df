"""Autocast around the user's code, off while a backward or an optimizer's step runs.

torch's cache of cast weights is off: it is emptied only when the outermost autocast ends, and a whole training loop is inside of this
one, so weights would be those of the first step for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from parwrap.precision.aside import stand_aside
from parwrap.verbs.backward import Backward

__all__ = ["Autocasting"]


class Autocasting:
    """The actor that keeps autocast out of what is not a forward.

    It switches on again only what it has switched off itself: there may be another inside of it, or around it.

    Args:
        device: the type of device.
        dtype: to cast to; ``None`` for no autocast.
    """

    def __init__(self, device: str, dtype: torch.dtype | None) -> None:
        self._device, self._dtype = device, dtype
        self._depth, self._before = 0, False
        self._aside = dtype is None

    def around(self) -> AbstractContextManager:
        """Autocast itself; without a dtype, what it is in an autocast of another scope is switched off."""
        return torch.autocast(self._device, self._dtype or torch.bfloat16, enabled=self._dtype is not None, cache_enabled=False)

    def backward(self, call: Backward) -> None:
        if self._depth:
            self._on_again()  # a step has raised, so it was not seen to end
        with self._off():
            call.run()

    def step(self, optimizer: Optimizer) -> None:
        """A step begins; inside of it, there may be the step of a base class or of another optimizer."""
        if not self._depth:
            self._before = torch.is_autocast_enabled(self._device)
            torch.set_autocast_enabled(self._device, False)
        self._depth += 1

    def stepped(self, optimizer: Optimizer) -> None:
        if self._depth == 1:
            self._on_again()
        elif self._depth:
            self._depth -= 1

    def closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """In a closure is a forward."""

        def with_autocast() -> Any:
            depth = self._depth
            self._on_again()
            loss = closure()  # if it raises, the step is over
            self._depth = depth
            torch.set_autocast_enabled(self._device, False)
            return loss

        return with_autocast

    def enter_autocast(self, instance: torch.autocast) -> None:
        """The script enters an autocast of its own: this one is off from then on, as the script's authors had it."""
        if instance._enabled and instance.device == self._device and not self._aside:
            self._aside = True
            torch.set_autocast_enabled(self._device, False)
            stand_aside("torch.autocast", "it casts nothing itself here")

    def _on_again(self) -> None:
        self._depth = 0
        if self._before:
            torch.set_autocast_enabled(self._device, True)

    @contextmanager
    def _off(self) -> Iterator[None]:
        before = torch.is_autocast_enabled(self._device)
        torch.set_autocast_enabled(self._device, False)
        try:
            yield
        finally:
            if before:
                torch.set_autocast_enabled(self._device, True)
