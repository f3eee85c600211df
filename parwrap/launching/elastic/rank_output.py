"""What ranks say, on its way from them to the terminal and to a file for each: whole lines, with the rank before each where several speak.

A rank writes into named pipes that the launcher reads, so its last words are there however it ends, and so are those of native code and
of programs that are not Python. Which ranks are silent is left to ``output.py``.
"""

from __future__ import annotations

import os
import select
import selectors
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from parwrap.errors import LaunchError
from parwrap.rank_zero import output

__all__ = ["Lines", "Pipes", "RankOutput", "prefixed"]

STREAMS = {"out": 1, "err": 2, "aside": None}
"""What a rank writes into: its stdout and stderr, and what of it is for its file alone; with the launcher's descriptor for each."""

CAPACITY = 1 << 16
"""Bytes that a pipe holds."""

PROGRESS = 10.0
"""Seconds after which a line that overwrites itself, as a progress bar, is shown again."""


@dataclass(frozen=True)
class Pipes:
    """Where the ranks of a node are to write.

    Attributes:
        directory: where they are, as named pipes.
        everyone: whether all ranks are to be heard.
        logged: whether each has a file, so that what nobody hears is kept too.
    """

    directory: str
    everyone: bool
    logged: bool

    def open(self, local_rank: int) -> str | None:
        """From here on, this process writes there; returns where it writes what is for its file alone."""
        for stream, number in STREAMS.items():
            if number is not None:
                pipe = os.open(self._path(local_rank, stream), os.O_WRONLY)
                os.dup2(pipe, number)
                os.close(pipe)
        aside = self._path(local_rank, "aside") if self.logged else None
        output.settle(self.everyone, aside or os.devnull)
        return aside

    def _path(self, local_rank: int, stream: str) -> str:
        return os.path.join(self.directory, f"{local_rank}.{stream}")


class RankOutput:
    """The launcher's end: what the ranks of this node write is passed on, for as long as :meth:`passed_on` is held.

    Args:
        directory: an empty one, for the pipes.
        ranks: how many ranks this node has.
        everyone: show what each rank says, with the rank before each line; else it is shown as it comes.
        log_dir: the directory of the ranks' files; ``None`` for no files.

    Raises:
        LaunchError: there can be no files in that directory.
    """

    def __init__(self, directory: Path, ranks: int, everyone: bool, log_dir: str | None) -> None:
        self.pipes = Pipes(str(directory), everyone, log_dir is not None)
        self._log_dir = log_dir
        self._paths = [directory / f"{local_rank}.{stream}" for local_rank in range(ranks) for stream in STREAMS]
        self._ranks: Mapping[int, int] = {}
        self._files: dict[int, BinaryIO] = {}
        self._lost: set[int] = set()
        for path in self._paths:
            os.mkfifo(path)
        if log_dir is not None:
            try:
                os.makedirs(log_dir, exist_ok=True)
            except OSError as error:
                raise LaunchError(f"--log-dir {log_dir} cannot be made: {error.strerror}.") from None

    def rendezvous(self, wrapped: Callable, agent: Any, args: tuple, kwargs: dict) -> None:
        """A wrapper for the rendezvous of torch's agents, after which ranks have their numbers."""
        wrapped(*args, **kwargs)
        self.begin({worker.local_rank: worker.global_rank for worker in agent.get_worker_group().workers})

    def begin(self, ranks: Mapping[int, int]) -> None:
        """From here on the local ranks are these ``ranks``; existing log files are appended to."""
        self._ranks = ranks
        if self._log_dir is None:
            return
        for local_rank, rank in ranks.items():
            try:
                file = open(os.path.join(self._log_dir, f"rank_{rank}.log"), "a+b", buffering=0)  # noqa: SIM115
            except OSError as error:
                raise LaunchError(f"--log-dir {self._log_dir} cannot be written to: {error.strerror}.") from None
            if file.tell():
                _end_line(file)
                file.write(time.strftime("--- started again at %Y-%m-%d %H:%M:%S ---\n").encode())
            self._files[local_rank] = file

    @contextmanager
    def passed_on(self) -> Iterator[None]:
        """While this is held, what ranks say is passed on; at its end, all that they have said."""
        with ExitStack() as stack, selectors.DefaultSelector() as selector:
            for path in self._paths:
                # read and write: a pipe that nobody writes to any more would be at its end
                descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)
                stack.callback(os.close, descriptor)
                local_rank, _, stream = path.name.partition(".")
                selector.register(descriptor, selectors.EVENT_READ, self._passer(int(local_rank), STREAMS[stream]))
            asleep, awake = os.pipe()
            selector.register(asleep, selectors.EVENT_READ)
            thread = threading.Thread(target=_pass_on, args=(selector, asleep), name="parwrap output", daemon=True)
            thread.start()
            try:
                yield
            finally:
                os.close(awake)
                thread.join()
                os.close(asleep)
                for file in self._files.values():
                    file.close()

    def _passer(self, local_rank: int, shown: int | None) -> Callable[[bytes], None]:
        """What takes what one rank has written into one of its pipes; nothing, at the end."""
        lines, ranks = Lines(), self._ranks

        def take(said: bytes) -> None:
            nonlocal ranks
            if ranks is not self._ranks:  # they have started again
                if shown is not None and self.pipes.everyone:
                    _write(shown, prefixed(lines.take(b""), ranks.get(local_rank, local_rank)))
                ranks = self._ranks
            if file := self._files.get(local_rank):
                try:
                    file.write(said)
                except OSError as error:
                    del self._files[local_rank]
                    self._tell_of_loss(f"in {file.name}", error)
            if shown is not None and shown not in self._lost:
                try:
                    _write(shown, prefixed(lines.take(said), self._ranks.get(local_rank, local_rank)) if self.pipes.everyone else said)
                except BrokenPipeError:  # by who reads it
                    self._lost.add(shown)
                except OSError as error:
                    self._lost.add(shown)
                    self._tell_of_loss("shown", error)

        return take

    def _tell_of_loss(self, where: str, error: OSError) -> None:
        """Ranks go on: they would wait for ever for someone to read what they write."""
        with suppress(OSError):
            print(f"parwrap: what ranks write is not {where} from here on: {error.strerror}", file=sys.stderr)


class Lines:
    """Whole lines out of what comes in pieces. Of a line that overwrites itself, what is there in the end, and now and then before.

    >>> lines = Lines()
    >>> lines.take(b"epoch 1"), lines.take(b", loss 2\\n10%\\r20%\\rdone\\nepo"), lines.take(b"")
    ([], [b'epoch 1, loss 2', b'done'], [b'epo'])
    """

    def __init__(self) -> None:
        self._begun, self._shown = b"", time.monotonic()

    def take(self, said: bytes) -> list[bytes]:
        """The lines that are whole with what is ``said``; without anything, those that have been left."""
        *whole, self._begun = (self._begun + said).split(b"\n")
        if not said and self._begun:
            whole, self._begun = [self._begun], b""
        lines = [_last(line) for line in whole]
        if b"\r" in self._begun:
            self._begun = _last(self._begun)
            if time.monotonic() > self._shown + PROGRESS and self._begun.strip():
                lines.append(self._begun)
                self._shown = time.monotonic()
            self._begun = b"\r" + self._begun
        return lines


def prefixed(lines: list[bytes], rank: int) -> bytes:
    """``lines`` with the ``rank`` before each.

    >>> prefixed([b"one", b"two"], 1)
    b'[rank 1] one\\n[rank 1] two\\n'
    """
    return b"".join(b"[rank %d] %s\n" % (rank, line) for line in lines)


def _end_line(file: BinaryIO) -> None:
    """Have ``file``, which is not empty, end with a whole line."""
    file.seek(-1, os.SEEK_END)
    if file.read(1) != b"\n":
        file.write(b"\n")


def _write(descriptor: int, text: bytes) -> None:
    while text:
        try:
            text = text[os.write(descriptor, text) :]
        except BlockingIOError:  # others that have this terminal may have set it so
            select.select([], [descriptor], [])


def _last(line: bytes) -> bytes:
    """What can be read of ``line`` in the end."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def _pass_on(selector: selectors.BaseSelector, asleep: int) -> None:
    ended = False
    while not ended:
        for key, _ in selector.select():
            if key.fd == asleep:
                ended = True
            else:
                key.data(os.read(key.fd, CAPACITY))
    for key in selector.get_map().values():
        if key.data:
            with suppress(BlockingIOError):  # it is empty
                key.data(os.read(key.fd, CAPACITY))  # all that ranks have left: what lives on and goes on writing is not waited for
            key.data(b"")
