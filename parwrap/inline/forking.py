"""Forks ranks from this process: when this is possible, how, and what they inherit. ``launching.py`` watches and ends them."""

from __future__ import annotations

import gc
import importlib
import io
import multiprocessing
import os
import queue
import signal
import stat
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.utils.data import DataLoader

from parwrap.coordination.call_site import warn
from parwrap.errors import UsageError
from parwrap.group import group as groups
from parwrap.inline.child_output import ChildOutput
from parwrap.inline.object_graph import found_by
from parwrap.inline.python_changes import objects_reached
from parwrap.inline.rank_process import ENDING, Job, run
from parwrap.inline.returned_state import SyncedObjects
from parwrap.system.shared_memory import private_file
from parwrap.torch_private.cuda import is_in_bad_fork
from parwrap.torch_private.dataloader import ITERATOR, MultiProcessingDataLoaderIter, is_shut_down, mark_shut_down
from parwrap.torch_private.dynamo import DYNAMO
from parwrap.world.world import detect

__all__ = ["ForkState", "Forks", "choose_start_method", "import_for_optimizers", "refuse_unforkable", "starting"]


QUEUES = (queue.Queue, queue.SimpleQueue)
CHUNK = 1 << 20
CLOSED = ("IPython", "ipykernel", "zmq", "pytest", "_pytest", "pluggy")
"""Objects with their own threads that refer to everything else; they are not searched."""
WRITERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


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

    def start(self, job: Callable[..., Job], output: ChildOutput, pipe: int) -> Any:
        """The process of the rank that runs ``job``; adds to ``job`` how the rank starts."""
        how = {"load": self._load, "environ": self._environ, "threads": 1, "streams": None, "outputs": dict(output.outputs)}
        process = multiprocessing.get_context("fork").Process(target=run, args=(job(pipe=pipe, **how),))
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
    """Import what each rank's first optimizer would import, which takes a second, so that ranks forked afterwards have it."""
    importlib.import_module(DYNAMO)


def choose_start_method() -> str:
    """``"fork"`` if forked ranks can do everything that this process can, otherwise ``"spawn"``."""
    return "fork" if sys.platform == "linux" and not _cuda_has_started() else "spawn"


def refuse_unforkable(who: str, gpus: bool = False) -> None:
    """Raise :class:`UsageError` if ``who`` cannot fork ranks that use ``gpus``."""
    if not hasattr(os, "fork"):
        problem = "this system cannot fork: start ranks with `python -m parwrap.run`"
    elif groups.open_group() is not None or detect(os.environ).size > 1:
        problem = f"this is rank {groups.rank()} of {groups.world_size()} already: call it in a process that was not launched as a rank"
    elif multiprocessing.current_process().daemon:
        problem = "a daemonic process of multiprocessing cannot start processes: call it in the main process"
    elif not any(each is sys.modules for each in gc.get_objects()):  # Python 3.12 counts some objects as frozen from the start
        problem = "gc.freeze() hides objects whose changes must be sent back: call gc.unfreeze() first"
    elif _cuda_has_started() if gpus else torch.cuda.is_initialized():
        problem = "CUDA is initialized here, and does not work after a fork: call it before anything is on a GPU"
        problem += " and before torch.cuda.is_available() is called, or use start_method='spawn'" * gpus
    else:
        return
    raise UsageError(f"{who} forks ranks from this process, and {problem}.")


def _cuda_has_started() -> bool:
    """Whether forked ranks could not use the GPUs: once torch has initialized CUDA, and also after ``torch.cuda.is_available()``."""
    if torch.cuda.is_initialized() or not torch.cuda.device_count():
        return torch.cuda.is_initialized()
    with starting():
        child = os.fork()
        if not child:
            os._exit(is_in_bad_fork())
    return os.waitpid(child, 0)[1] != 0


@contextmanager
def starting() -> Iterator[None]:
    """Delay signals while processes are started: those that end a rank until it is ready, and Ctrl-C until all ranks are started.

    Python's warning about threads is suppressed, because torch's threads are handled.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*use of fork", category=DeprecationWarning)
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class ForkState:
    """What forked ranks inherit but cannot all use: files that the caller is writing, workers of its loaders, and objects of its threads.

    Flush these files before the fork, because every rank would write what is in their buffers.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile("w") as file:
    ...     _ = file.write("header")
    ...     _ = ForkState()
    ...     open(file.name).read()
    'header'
    """

    def __init__(self) -> None:
        everything = gc.get_objects()
        wanted = (*WRITERS, io.FileIO, DataLoader, MultiProcessingDataLoaderIter)
        kinds = {kind for kind in set(map(type, everything)) if issubclass(kind, wanted)}
        mine = [thing for thing in everything if type(thing) in kinds]
        shown = {_place(number) for number in (1, 2)}
        raw = [thing for thing in mine if isinstance(thing, io.FileIO) and _is_written(thing)]
        self._raw = {file.fileno(): file for file in raw if _place(file.fileno()) not in shown}
        self._writers = [thing for kind in WRITERS for thing in mine if isinstance(thing, kind) and _number(thing) in self._raw]
        self._loaders = [thing for thing in mine if isinstance(thing, DataLoader)]
        self._passes = [thing for thing in mine if isinstance(thing, MultiProcessingDataLoaderIter)]
        self.flush()

    def warn(self, function: Callable) -> None:
        """Warn of objects that ``function`` uses and that need threads or workers of the caller, which a forked rank lacks."""
        resting = {threading.main_thread(), threading.current_thread()}
        threads = [thread for thread in threading.enumerate() if thread not in resting]
        fed = {id(found) for thread in threads for _, found in found_by(thread.run, _is_queue, _is_opened)}
        needing = {id(each): "workers" for each in self._passes if not is_shut_down(each)}
        needing |= dict.fromkeys({id(thread) for thread in threads} | fed, "threads")
        found = list(found_by(function, lambda thing: id(thing) in needing, _is_opened)) if needing else []
        for kind in sorted({needing[id(thing)] for _, thing in found}):
            names = sorted({name for name, thing in found if needing[id(thing)] == kind})
            warn(
                f"parwrap: the function reaches {', '.join(names[:3])}, which need {kind} of this process. Forked ranks do not have "
                f"these {kind}, and would wait for them forever. Create such objects inside the function."
            )

    def flush(self) -> None:
        """Flush their buffers."""
        for writer in self._writers:
            if not writer.closed:
                writer.flush()

    def settle(self, rank: int) -> None:
        """In a rank, keep the files on rank 0 only, and forget the workers, because they would end when a rank ends."""
        for each in self._passes:
            mark_shut_down(each)
        for loader in self._loaders:
            vars(loader)[ITERATOR] = None
        for number, file in self._raw.items() if rank else ():
            with private_file() as copy:
                if file.readable():
                    for start in range(0, os.fstat(number).st_size, CHUNK):
                        copy.write(os.pread(number, CHUNK, start))
                    copy.flush()
                    os.lseek(copy.fileno(), os.lseek(number, 0, os.SEEK_CUR), os.SEEK_SET)
                os.dup2(copy.fileno(), number, inheritable=False)


def _is_written(file: io.FileIO) -> bool:
    """Whether ``thing`` is a named file that is open for writing."""
    with suppress(OSError, ValueError):
        return file.writable() and isinstance(file.name, str) and stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    return False


def _number(writer: Any) -> int | None:
    with suppress(OSError, ValueError):
        return writer.fileno()
    return None


def _place(number: int) -> tuple[int, int] | None:
    """Identifies the file of a descriptor."""
    with suppress(OSError):
        found = os.fstat(number)
        return found.st_dev, found.st_ino
    return None


def _is_queue(thing: Any) -> bool:
    return issubclass(type(thing), QUEUES)


def _is_opened(thing: Any) -> bool:
    """Whether to search ``thing`` for objects of threads and workers; those of loaders are already handled."""
    return not issubclass(type(thing), DataLoader) and str(type(thing).__module__).split(".")[0] not in CLOSED
