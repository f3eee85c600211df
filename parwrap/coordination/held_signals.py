"""Delays Python's signal handlers during a backward.

A Ctrl-C between the entry into a backward and the sending of its gradients would leave the other ranks waiting for them, in a collective
that no signal ends.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from parwrap.patching.patch import Patch, installed

__all__ = ["HeldSignals"]


class HeldSignals:
    """Delays signals that arrive after :meth:`hold` until :meth:`release`.

    Attributes:
        held: whether handlers are delayed.
        arrived: the handlers of the signals that have arrived.
    """

    def __init__(self) -> None:
        self.held = False
        self.arrived: dict[int, Callable[[FrameType | None], Any]] = {}

    def hold(self) -> None:
        """Delay handlers from now on. This only has an effect in the main thread, where Python runs handlers."""
        self.held = threading.current_thread() is threading.main_thread()

    def release(self) -> None:
        """Run the handlers of the signals that have arrived, which may raise."""
        if self.held:
            self.held = False
            self.run_arrived()

    def run_arrived(self) -> None:
        """Run the handlers of the signals that have arrived."""
        while self.arrived:
            self.arrived.pop(next(iter(self.arrived)))(sys._getframe(1))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside the block, make signal handlers delayable: those already set, and those that the script sets."""
        if threading.current_thread() is not threading.main_thread():  # where Python refuses to set handlers
            yield
            return
        patches = [Patch(signal, "signal", self._set), Patch(signal, "getsignal", self._get)]
        change = signal.signal
        for number in signal.valid_signals():
            if callable(handler := signal.getsignal(number)):
                change(number, self._waiting(handler))
        try:
            with installed(patches):
                yield
        finally:
            try:
                self.release()
            finally:
                for number in signal.valid_signals():
                    if isinstance(handler := signal.getsignal(number), _Waiting):
                        change(number, handler.handler)

    def _set(self, wrapped: Callable, instance: object, args: tuple, kwargs: dict) -> Any:
        number, handler = args if len(args) == 2 else (None, None)
        if not callable(handler):
            return _as_set(wrapped(*args, **kwargs))
        return _as_set(wrapped(number, self._waiting(handler)))

    def _get(self, wrapped: Callable, instance: object, args: tuple, kwargs: dict) -> Any:
        return _as_set(wrapped(*args, **kwargs))

    def _waiting(self, handler: Any) -> _Waiting:
        def handle(number: int, frame: FrameType | None) -> None:
            if self.held:
                self.arrived[number] = lambda frame: handler(number, frame)  # once, as Python does with pending signals
            else:
                handler(number, frame)

        return _Waiting(handler, handle)


class _Waiting:
    """A signal handler that can delay the one that the script has set, ``handler``."""

    def __init__(self, handler: Any, handle: Callable[[int, FrameType | None], Any]) -> None:
        self.handler, self._handle = handler, handle

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        return self._handle(number, frame)


def _as_set(handler: Any) -> Any:
    return handler.handler if isinstance(handler, _Waiting) else handler
