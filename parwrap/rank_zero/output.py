"""Rank 0 speaks: the output of the other ranks goes to their log, or nowhere (contract, rule 8).

On a silent rank, the file descriptors 1 and 2 are redirected, so that native code and child processes are silent too. ``sys.stdout`` and
``sys.stderr`` stay the same objects.
"""

from __future__ import annotations

import builtins
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, TextIO

from parwrap.intercept.patch import Patch, installed
from parwrap.rank_zero.trackers import trackers_silent

__all__ = ["Output", "output_of"]


class Output:
    """The streams that the user sees even from a silent rank.

    Attributes:
        stdout: the stream for ``print(..., force=True)``; ``None`` on a rank that is not silent.
        errors: the stream for errors that the user must see, on every rank.
    """

    def __init__(self, stdout: TextIO | None = None, errors: TextIO | None = None) -> None:
        self.stdout = stdout
        self._errors = errors

    @property
    def errors(self) -> TextIO:
        return self._errors or sys.stderr

    def instead_of(self, file: TextIO | None) -> TextIO | None:
        """The stream for a forced print to ``file``; ``None`` if ``file`` itself is not silent."""
        if self.stdout is None or file not in (None, sys.stdout, sys.stderr):
            return None
        return self.errors if file is sys.stderr else self.stdout


@contextmanager
def output_of(rank: int, log: str | None = None, heard: bool = False) -> Iterator[Output]:
    """Let rank 0 alone print inside the block; ``print(..., force=True)`` prints on every rank.

    Args:
        rank: this rank.
        log: the file for the output of a silent rank; by default it is dropped.
        heard: whether this rank prints too, because a launcher shows all ranks.

    Yields:
        the streams that the user sees.
    """
    with ExitStack() as stack:
        output = Output() if rank == 0 or heard else stack.enter_context(_silent(log or os.devnull))
        if rank > 0:
            stack.enter_context(trackers_silent())
        stack.enter_context(installed([_print_patch(output), _thread_patch(output)]))
        yield output


def _print_patch(output: Output) -> Patch:
    """A patch that gives ``print`` the argument ``force``: with it, this rank prints to where its output went before it was silent."""

    def speak(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> None:
        force = kwargs.pop("force", False)
        stream = output.instead_of(kwargs.get("file")) if force else None
        wrapped(*args, **({**kwargs, "file": stream, "flush": True} if stream else kwargs))

    return Patch(builtins, "print", speak)


def _thread_patch(output: Output) -> Patch:
    """A patch that shows the error of a thread, also on a silent rank."""

    def show(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> None:
        with redirect_stderr(output.errors):
            wrapped(*args, **kwargs)

    return Patch(threading, "excepthook", show)


@contextmanager
def _silent(log: str) -> Iterator[Output]:
    """Redirect stdout and stderr to the file ``log`` inside the block. Yields streams that still write to where they went before."""
    _flush()
    with ExitStack() as stack:
        target = stack.enter_context(open(log, "a", buffering=1))
        heard = [_heard(stream, number, stack) for number, stream in ((1, sys.stdout), (2, sys.stderr))]
        for number in sorted({1, 2} | {number for stream in (sys.stdout, sys.stderr) if (number := _descriptor(stream)) is not None}):
            _lead(number, target.fileno(), stack)
        if _descriptor(sys.stdout) is None:  # in memory, or of a notebook
            stack.enter_context(redirect_stdout(target))
        if _descriptor(sys.stderr) is None:
            stack.enter_context(redirect_stderr(target))
        stack.callback(_flush)
        yield Output(*heard)


def _lead(number: int, target: int, stack: ExitStack) -> None:
    """Redirect the file descriptor ``number`` to ``target`` until ``stack`` closes."""
    try:
        before = os.dup(number)
    except OSError:  # closed, as in a daemon
        return
    inheritable = os.get_inheritable(number)
    os.dup2(target, number, inheritable)
    stack.callback(os.close, before)
    stack.callback(os.dup2, before, number, inheritable)


def _heard(stream: TextIO, number: int, stack: ExitStack) -> TextIO:
    """A stream that goes on writing to the present destination of ``stream`` when ``stream`` itself is redirected."""
    descriptor = _descriptor(stream)
    if descriptor is None:
        return stream
    return stack.enter_context(open(os.dup(descriptor), "w", buffering=1, encoding=getattr(stream, "encoding", None), errors="replace"))


def _descriptor(stream: Any) -> int | None:
    with suppress(Exception):  # streams of notebooks and tests raise several kinds
        return int(stream.fileno())
    return None


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
