"""How signals end ranks: each reaches a rank once, and ``finally`` blocks run before the launcher kills.

The terminal sends Ctrl-C to the launcher and to the ranks, and the launcher forwards it, so a rank could receive it twice.
Each rank records received signals in a file. The interpreter's own C handler does this, so it happens immediately and before any handler of
the script. The launcher forwards a signal only to ranks that have not noted it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from parwrap.ranks.platform import KILL, OPEN_OWN, known_signals, raise_in_main_thread, run_after_fork
from parwrap.torch_private.elastic import process_context

__all__ = ["Terminated", "forward_messages", "forward_once", "note_signals", "noting_messages", "raise_on_sigterm", "terminate"]

ARRIVING = 0.5
"""Seconds after which a signal to the launcher and the ranks has reached all of them."""

SAME = 5.0
"""Seconds after which a signal that a rank recorded counts as a different one from the launcher's."""

FINISHING = 20.0
"""Seconds for a rank that handles an exception when SIGTERM arrives; the launcher kills it after 30."""

AGAIN = 0.5
"""Seconds after which a rank that was handling an exception at SIGTERM looks whether it still does."""

MESSAGES = known_signals("SIGUSR1", "SIGUSR2")
"""Signals whose meaning is the script's, such as to save: they end no launch."""

_finishing_until: float | None = None


class Terminated(SystemExit):
    """SIGTERM has arrived, for example because another rank has failed. Its exit code is the one that a shell shows."""


def terminate(number: int, frame: object) -> None:
    """The handler of SIGTERM in a rank: raises :class:`Terminated`, so that ``finally`` blocks run.

    While the rank handles an exception, ``finally`` blocks may be running: they get :data:`FINISHING` seconds, and so does an ``except``
    block, which looks the same. At a backward, ``frame`` is ``None``: the script trains, and all ranks raise there.
    """
    global _finishing_until
    _finishing_until = _finishing_until or time.monotonic() + FINISHING
    if sys.exc_info()[1] is None or frame is None or time.monotonic() > _finishing_until:
        _finishing_until = None
        raise Terminated(128 + number)
    again = threading.Timer(AGAIN, raise_in_main_thread, (number,))
    again.daemon = True
    again.start()


def raise_on_sigterm() -> None:
    """Install :func:`terminate` in this rank, but not in processes that it forks."""
    signal.signal(signal.SIGTERM, terminate)
    run_after_fork(_as_before)


def _as_before() -> None:
    if signal.getsignal(signal.SIGTERM) is terminate:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def note_signals(directory: Path) -> None:
    """Record the signals that this rank receives from now on. The script may override this with ``signal.set_wakeup_fd``."""
    noted = os.open(_notes(directory, os.getpid()), os.O_RDWR | os.O_CREAT | os.O_APPEND | OPEN_OWN | getattr(os, "O_NONBLOCK", 0))
    signal.set_wakeup_fd(noted, warn_on_full_buffer=False)
    run_after_fork(partial(_forget, noted))


def _forget(noted: int) -> None:
    """Stop recording signals in a forked process, because they are not the rank's."""
    with suppress(ValueError):  # in a thread, where Python has no wakeup descriptor
        other = signal.set_wakeup_fd(-1)
        if other not in (noted, -1):
            signal.set_wakeup_fd(other)


def forward_once(directory: Path, closed: list[Any]) -> Callable:
    """A wrapper for ``MultiprocessContext._close``, which sends a signal to all ranks and kills those alive after a timeout.

    The wrapper skips ranks that have already received the launcher's signal.

    Args:
        directory: where the ranks note their signals.
        closed: a list that is filled with the processes of the ranks.
    """

    def close(wrapped: Callable, context: Any, args: tuple, kwargs: dict) -> None:
        number, started = kwargs["death_sig"], process_context(context)
        closed[:] = processes = started.processes if started else []
        if number != getattr(sys.exc_info()[1], "sigval", None):  # torch ends the ranks for another reason
            return wrapped(*args, **kwargs)
        end = time.monotonic() + kwargs["timeout"]
        _send(directory, number, processes, time.time() - SAME)
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        return wrapped(*args, **{**kwargs, "death_sig": KILL})

    return close


@contextmanager
def noting_messages() -> Iterator[list[tuple[int, float]]]:
    """Inside the block, record which :data:`MESSAGES` this launcher gets, and when, instead of letting them end it.

    :func:`forward_messages` sends them to the ranks.
    """
    noted: list[tuple[int, float]] = []
    ours = [number for number in MESSAGES if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, lambda number, frame: noted.append((number, time.time())))
    try:
        yield noted
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def forward_messages(noted: list[tuple[int, float]], directory: Path, processes: list[Any]) -> None:
    """Send each ``noted`` signal to the ranks that have not received it, and empty ``noted``."""
    while noted:
        number, arrived = noted.pop(0)
        _send(directory, number, processes, arrived - ARRIVING)


def _send(directory: Path, number: int, processes: list[Any], since: float) -> None:
    """Send a signal to those of ``processes`` that have not received it ``since`` that time."""
    for process in _without(directory, number, processes, since):
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)


def _without(directory: Path, number: int, processes: list[Any], since: float) -> list[Any]:
    """The ``processes`` that are alive and have not received the signal, after giving it time to arrive."""
    until = time.monotonic() + ARRIVING
    while True:
        left = [each for each in processes if each.is_alive() and not _received(_notes(directory, each.pid), number, since)]
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.02)


def _received(notes: Path, number: int, since: float) -> bool:
    try:
        # the SIGCHLD of a worker that the same Ctrl-C ends may be recorded after the signal
        last = notes.read_bytes().rstrip(bytes(known_signals("SIGCHLD")))[-1:]
        return last == bytes([number]) and notes.stat().st_mtime > since
    except FileNotFoundError:  # the rank is still starting
        return False


def _notes(directory: Path, process: int) -> Path:
    return directory / f"signals-{process}"
