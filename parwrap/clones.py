"""The actor on output and files: ranks above 0 are clones of rank 0, which alone speaks and saves.

Nothing here is a collective: a clone that reads a file which it has "written" waits for rank 0's same version of it by way of
the store, so a save that never comes cannot hold up other ranks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import torch

from parwrap.group import Group, is_alone

__all__ = ["Clones", "Voice"]


class Voice:
    """What a single rank needs: ``print`` takes ``force=`` there too."""

    def speak(self, say: Callable[..., None], file: TextIO | None, force: bool) -> None:
        say()


class Clones:
    """Lets rank 0 speak and save, and the others load.

    Args:
        group: the process group.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._rank = group.world.rank
        self._saved: Counter[str] = Counter()
        self._loaded: Counter[str] = Counter()
        self._streams = (sys.stdout, sys.stderr)

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """Above rank 0, what is written to stdout and stderr is dropped: by print, tqdm, warnings and logging alike."""
        if self._rank == 0:
            yield
            return
        with open(os.devnull, "w") as out, open(os.devnull, "w") as err, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            yield

    def speak(self, say: Callable[..., None], file: TextIO | None, force: bool) -> None:
        """``print``; with ``force=True`` on every rank."""
        if self._rank == 0 or not force:
            say()
        elif file in (None, sys.stdout, sys.stderr):
            stdout, stderr = self._streams
            say(file=stderr if file is sys.stderr else stdout, flush=True)
        else:
            say()

    def log(self, record: logging.LogRecord, handle: Callable[[], None]) -> None:
        """A log record: rank 0's go where they went; of the others only errors are heard, with their rank."""
        if self._rank == 0:
            handle()
        elif record.levelno >= logging.ERROR:
            text = logging.Formatter("%(levelname)s:%(name)s:%(message)s").format(record)
            print(f"[rank {self._rank}] {text}", file=self._streams[1], flush=True)

    def save(self, file: Any, write: Callable[[Any], None]) -> None:
        """``torch.save``: to a path only by rank 0, which writes beside it and renames, so that nobody reads half a file."""
        path = _path(file)
        if path is None:
            write(file)
        elif is_alone():
            _write_beside(path, write)
        else:
            self._saved[path] += 1
            if self._rank == 0:
                _write_beside(path, write)
                self._group.store.set(f"saved/{self._saved[path]}/{path}", b"")

    def load(self, file: Any, location: Any, read: Callable[[Any], Any]) -> Any:
        """``torch.load``: what rank 0 has saved at the same point of its run, on the device of this rank."""
        path = _path(file)
        if path is not None and self._saved[path] and not is_alone():
            self._wait_for(path)
        return read(_on_own_gpu(location) if torch.cuda.is_available() else location)

    def _wait_for(self, path: str) -> None:
        """Until rank 0 has saved ``path`` as often as this rank did, or loads it too: it may have saved less often."""
        self._loaded[path] += 1
        saved, loaded = f"saved/{self._saved[path]}/{path}", f"loaded/{self._loaded[path]}/{path}"
        if self._rank == 0:
            self._group.store.set(loaded, b"")
        else:
            self._group.wait_for_any((saved, loaded), 0, f"torch.save of {path}")


def _path(file: Any) -> str | None:
    """The absolute path that ``file`` names, or ``None`` for an open file."""
    if not isinstance(file, (str, os.PathLike)):
        return None
    return os.path.realpath(os.fspath(file))


def _write_beside(path: str, write: Callable[[Any], None]) -> None:
    if os.path.exists(path) and not os.path.isfile(path):
        write(path)  # a device or a pipe cannot be renamed over
        return
    beside = f"{path}.{os.getpid()}.part"
    try:
        write(beside)
        os.replace(beside, path)
    finally:
        Path(beside).unlink(missing_ok=True)


def _on_own_gpu(location: Any) -> Any:
    """``map_location`` for a rank that sees one GPU, whichever ``location`` names or the file was saved from."""
    if location is None:
        return lambda storage, saved_from: storage.cuda() if saved_from.startswith("cuda") else storage
    return "cuda" if str(location).startswith("cuda") else location
