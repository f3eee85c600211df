"""Autocast around the user's code, off during a backward or an optimizer's step, and while a loader draws.

Torch's cache of cast weights is off, because it is only cleared when the outermost autocast ends. A whole training loop runs inside
parwrap's autocast, so with the cache every step would compute with the weights of the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from parwrap.intercept.intercepted_calls import Backward, Batches
from parwrap.intercept.interceptor import Interceptor
from parwrap.places import script_place
from parwrap.torch_private.amp import autocast_enabled
from parwrap.torch_private.optimizer import stepping

__all__ = ["Autocasting"]


class Autocasting(Interceptor):
    """Turns autocast off during backwards and optimizer steps, and while a loader draws.

    It turns on only what it has turned off, because there may be other autocasts inside or around it.

    Args:
        device: the type of device.
        dtype: the dtype to cast to; ``None`` for no autocast.
        say: prints a line on rank 0.
    """

    def __init__(self, device: str, dtype: torch.dtype | None, say: Callable[[str], None]) -> None:
        self._device, self._dtype, self._say = device, dtype, say
        self._steps, self._before = 0, False
        self._user_managed = dtype is None

    @contextmanager
    def around(self) -> Iterator[None]:
        """The autocast context. Without a dtype, it turns off the autocast of an outer scope."""
        with torch.autocast(self._device, self._dtype or torch.bfloat16, enabled=self._dtype is not None, cache_enabled=False):
            yield

    def iterate(self, loader: DataLoader, original: Callable[[DataLoader], Iterator]) -> Iterator:
        """Read batches without parwrap's autocast, in worker processes too, as in a script that autocasts only its forward pass."""
        with self.off_for_data():
            return _Drawn(original(loader), self)

    def off_for_data(self) -> AbstractContextManager[None]:
        """Turn parwrap's autocast off inside the block, where data is drawn. An autocast of the script stays as it is."""
        return nullcontext() if self._user_managed else self._off()

    def end_failed_step(self) -> None:
        """Turn autocast on again if the last step has raised an error: :meth:`stepped` was not called then."""
        if not stepping():
            self._on_again()

    def backward(self, call: Backward) -> None:
        self._on_again()  # inside a closure, or after a step that has raised
        with self._off():
            call.run()

    def step(self, optimizer: Optimizer) -> None:
        """Turn autocast off until the end of the step, which may contain the step of a base class or of another optimizer."""
        if not self._steps:
            self._before = torch.is_autocast_enabled(self._device)
            torch.set_autocast_enabled(self._device, False)
        self._steps += 1

    def stepped(self, optimizer: Optimizer) -> None:
        if self._steps == 1:
            self._on_again()
        elif self._steps:
            self._steps -= 1

    def closure(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return ``closure`` with autocast turned on again inside it, because it contains a forward pass."""

        def with_autocast() -> Any:
            steps = self._steps
            self._on_again()
            loss = closure()  # if it raises, the step has ended
            self._steps = steps
            torch.set_autocast_enabled(self._device, False)
            return loss

        return with_autocast

    def enter_autocast(self, instance: torch.autocast) -> None:
        """When the script enters an enabled autocast, turn parwrap's off for good. When it enters a disabled one, print what that does."""
        if instance.device != self._device or self._user_managed:
            return
        if autocast_enabled(instance):
            self._user_managed, self._before = True, False
            torch.set_autocast_enabled(self._device, False)
            self._say(
                "this script uses torch.autocast itself, so parwrap.amp leaves it alone and casts nothing. To let parwrap.amp cast, remove "
                "torch.autocast from the script."
            )
        else:
            self._say(
                f"torch.autocast(enabled=False) at {script_place()} keeps that part in float32. If this line belongs to the script's own "
                "option for mixed precision, turn on that option instead of parwrap.amp, or remove the line."
            )

    def _on_again(self) -> None:
        """Turn autocast on again if :meth:`step` has turned it off."""
        if self._steps and self._before:
            torch.set_autocast_enabled(self._device, True)
        self._steps = 0

    @contextmanager
    def _off(self) -> Iterator[None]:
        before, user_managed = torch.is_autocast_enabled(self._device), self._user_managed
        torch.set_autocast_enabled(self._device, False)
        try:
            yield
        finally:
            if before and user_managed == self._user_managed:
                torch.set_autocast_enabled(self._device, True)


class _Drawn(Batches):
    """Draws each batch without autocast."""

    def __init__(self, batches: Iterator, casting: Autocasting) -> None:
        super().__init__(batches)
        self._casting = casting

    def __next__(self) -> Any:
        self._casting.end_failed_step()
        with self._casting.off_for_data():
            return super().__next__()
