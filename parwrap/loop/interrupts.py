"""Ctrl-C and SIGTERM: held until all ranks can leave at the same backward (contract, small print on interrupts).

A launcher sends the signal to every rank, but each gets it in another step. A rank that holds a signal says so in its next backward; after
that backward all ranks raise. So the ranks of a script that catches the interrupt, to test and save, are still in lockstep.
"""

from __future__ import annotations

import _thread
import os
import signal
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from parwrap.ranks.platform import raise_in_main_thread

__all__ = ["Interrupts", "noting_arrivals"]

LONGEST = 2.0
"""Seconds after which a rank that reaches no backward raises by itself."""


class Interrupts:
    """Holds the first SIGINT or SIGTERM while a scope is open.

    Attributes:
        held: the signal that this rank holds, if any.
        raised: whether this rank has raised one, so that ranks may be apart from now on.
    """

    def __init__(self) -> None:
        self.held: int | None = None
        self.raised = False
        self._handlers: dict[int, Any] = {}
        self._timer: threading.Timer | None = None
        self._error: Exception | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside the block, hold the first SIGINT or SIGTERM until :meth:`release`.

        Without a release, the signal is raised after 2 s, or at the end of the block. Signals that are ignored, or have their default
        action, are not held.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        for number in map(int, (signal.SIGINT, signal.SIGTERM)):
            if callable(before := signal.getsignal(number)):
                self._handlers[number] = before
                signal.signal(number, self._hold)
        try:
            yield
        finally:
            self._stop_waiting()
            self.put_back()
        if self.held is not None:  # no backward has come
            raise_in_main_thread(self.held)

    def put_back(self) -> None:
        """Set the handlers that were there before."""
        for number, before in self._handlers.items():
            if signal.getsignal(number) == self._hold:  # else the script has set its own
                signal.signal(number, before)

    def raise_soon(self, error: Exception) -> None:
        """Raise ``error`` in the main thread, from another one, once Python runs there; not if the script handles all signals itself."""
        self._error = error
        if (number := next((each for each in self._handlers if signal.getsignal(each) == self._hold), None)) is not None:
            _thread.interrupt_main(signal.Signals(number))

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self.held is None and not self.raised:
            self.held = number
            self._timer = threading.Timer(LONGEST, self._waited, (number,))
            self._timer.daemon = True
            self._timer.start()
        else:  # a second signal, or no backward has come
            self.release(number, frame)

    def _waited(self, number: int) -> None:
        if self.held == number:
            raise_in_main_thread(number)

    def release(self, number: int | None = None, frame: FrameType | None = None) -> None:
        """Do what the signal does without a scope: by default, raise ``KeyboardInterrupt``.

        Without a ``number``, all ranks call it after the same backward. A rank that the signal has not reached yet waits up to 2 s for it,
        because the other ranks do not say which signal they hold.
        """
        deadline = time.monotonic() + LONGEST
        while number is None and self.held is None and time.monotonic() < deadline:
            time.sleep(0.005)
        number = number or self.held or int(signal.SIGINT)
        self._stop_waiting()
        self.held, self.raised = None, True
        self._handlers.get(number, signal.default_int_handler)(number, frame)

    def unheard(self, arrived: bytes) -> bool:
        """Whether this rank should hold one of the ``arrived`` signals and does not yet, because the main thread is in native code."""
        return self.held is None and not self.raised and any(signal.getsignal(number) == self._hold for number in arrived)

    def hold_no_more(self) -> None:
        """From now on, a signal raises at once, because no backward of all ranks will come."""
        self.raised = True

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


@contextmanager
def noting_arrivals() -> Iterator[Callable[[], bytes]]:
    """Yields a function that returns the numbers of the signals that have arrived in the block, also those that Python has not handled yet.

    Python's C handler writes them to a file: the launcher's, if there is one. If the script has set a pipe or socket by
    ``signal.set_wakeup_fd``, the function returns none.
    """
    if threading.current_thread() is not threading.main_thread():
        yield bytes
        return
    noted = before = signal.set_wakeup_fd(-1)
    with tempfile.TemporaryFile(buffering=0) as own:
        if before == -1:
            noted = own.fileno()
            os.set_blocking(noted, False)
        signal.set_wakeup_fd(noted, warn_on_full_buffer=False)
        at_entry = os.fstat(noted)
        try:
            yield lambda: os.pread(noted, os.fstat(noted).st_size, at_entry.st_size) if stat.S_ISREG(at_entry.st_mode) else b""
        finally:
            if before == -1 and (now := signal.set_wakeup_fd(-1)) != noted:
                signal.set_wakeup_fd(now)  # the script's
