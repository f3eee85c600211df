"""Inherited state that forked ranks cannot all use: files that the caller is writing, its loaders' workers, and objects of its threads."""

from __future__ import annotations

import gc
import io
import os
import queue
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch.utils.data import DataLoader

from parwrap.coordination.call_site import warn
from parwrap.inline.object_graph import found_by
from parwrap.system.shared_memory import private_file
from parwrap.torch_private.dataloader import ITERATOR, MultiProcessingDataLoaderIter, is_shut_down, mark_shut_down

__all__ = ["ForkState"]

QUEUES = (queue.Queue, queue.SimpleQueue)
CHUNK = 1 << 20
CLOSED = ("IPython", "ipykernel", "zmq", "pytest", "_pytest", "pluggy")
"""Objects with their own threads that lead to everything: they are not searched."""
WRITERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


class ForkState:
    """The state in the caller. Creating it flushes the caller's files, because every rank would write what is in a buffer.

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
        spoken = {_place(number) for number in (1, 2)}
        raw = [thing for thing in mine if isinstance(thing, io.FileIO) and _is_written(thing)]
        self._raw = {file.fileno(): file for file in raw if _place(file.fileno()) not in spoken}
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
                f"parwrap: the function reaches {', '.join(names[:3])}, which need {kind} of this process, and forked ranks have none of "
                f"these {kind}: waiting for them there never ends. Make it inside the function."
            )

    def flush(self) -> None:
        """Flush their buffers."""
        for writer in self._writers:
            if not writer.closed:
                writer.flush()

    def settle(self, rank: int) -> None:
        """In a rank: rank 0 keeps the files, others write nowhere; and drop the workers, which a rank's end would end."""
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
    """Whether it is a file with a name that is open for writing."""
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
    """Whether to search it for objects of threads and workers; a loader's are handled already."""
    return not issubclass(type(thing), DataLoader) and str(type(thing).__module__).split(".")[0] not in CLOSED
