"""Ranks that are forked from this process: when that is possible, and how. ``launching.py`` watches and ends them."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from parwrap.errors import UsageError
from parwrap.group import group as groups
from parwrap.inline.child_output import ChildOutput
from parwrap.inline.fork_state import ForkState
from parwrap.inline.object_changes import objects_reached
from parwrap.inline.object_sync import SyncedObjects
from parwrap.inline.rank_process import ENDING, Job, run
from parwrap.torch_private.cuda import is_in_bad_fork
from parwrap.torch_private.dynamo import DYNAMO
from parwrap.world.world import detect

__all__ = ["Forks", "choose_start_method", "import_for_optimizers", "refuse_unforkable", "starting"]


class Forks:
    """Starts ranks that inherit everything in this process.

    Args:
        function: the function to call.
        environ: their environment variables.
    """

    def __init__(self, function: Callable[[], Any], environ: Mapping[str, str]) -> None:
        self.callers = SyncedObjects(reached=objects_reached(function))
        self.callers.watch()
        self._function, self._environ, self._inherited = function, environ, ForkState()
        self._inherited.warn(function)

    def start(self, job: Callable[..., Job], heard: ChildOutput, word: int) -> Any:
        """The process of the rank that runs ``job``, completed with how it starts."""
        how = {"load": self._load, "environ": self._environ, "threads": 1, "streams": None, "outputs": dict(heard.outputs)}
        process = multiprocessing.get_context("fork").Process(target=run, args=(job(word=word, **how),))
        process.start()
        return process

    def _load(self, device: torch.device) -> tuple[Callable[[], Any], SyncedObjects]:
        self._inherited.settle(groups.rank())
        return self._called, self.callers

    def _called(self) -> Any:
        try:
            return self._function()
        finally:
            self._inherited.flush()  # a forked process does not flush them at its end


def import_for_optimizers() -> None:
    """Import what each rank's first optimizer would, in a second: ranks forked afterwards have it."""
    importlib.import_module(DYNAMO)


def choose_start_method() -> str:
    """``"fork"`` if a fork can do all that this process can, otherwise ``"spawn"``."""
    return "fork" if sys.platform == "linux" and not _cuda_has_started() else "spawn"


def refuse_unforkable(who: str, gpus: bool = False) -> None:
    """Raise :class:`UsageError` if ``who`` cannot fork ranks that use ``gpus``."""
    if not hasattr(os, "fork"):
        problem = "this system cannot do that: start ranks with `python -m parwrap.run`"
    elif groups.open_group() is not None or detect(os.environ).size > 1:
        problem = f"this is rank {groups.rank()} of {groups.world_size()} already: call it in a process that was not launched as a rank"
    elif multiprocessing.current_process().daemon:
        problem = "this is a daemonic process of multiprocessing, which may start none: call it in the main process"
    elif not any(each is sys.modules for each in gc.get_objects()):  # Python 3.12 counts some objects as frozen from the start
        problem = "gc.freeze() hides objects that have to come back: call gc.unfreeze() before"
    elif _cuda_has_started() if gpus else torch.cuda.is_initialized():
        problem = "CUDA has started here, which does not survive that: call it before anything is on a GPU"
        problem += " and torch.cuda.is_available() was asked, or give start_method='spawn'" * gpus
    else:
        return
    raise UsageError(f"{who} forks ranks from this process, and {problem}.")


def _cuda_has_started() -> bool:
    """Whether forked ranks could not use the GPUs: not only once torch has started CUDA, but also after ``torch.cuda.is_available()``."""
    if torch.cuda.is_initialized() or not torch.cuda.device_count():
        return torch.cuda.is_initialized()
    with starting():
        child = os.fork()
        if not child:
            os._exit(is_in_bad_fork())
    return os.waitpid(child, 0)[1] != 0


@contextmanager
def starting() -> Iterator[None]:
    """While processes are started: signals that end a rank arrive when it is ready, and Ctrl-C when all are started.

    Python warns of threads that the ranks do not have; torch's are handled.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*use of fork", category=DeprecationWarning)
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
