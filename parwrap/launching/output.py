"""Forwards the output of ranks to the terminal and to log files, one per rank: whole lines, prefixed with the rank if several are shown.

A rank writes into named pipes that the launcher reads. So its last output arrives however the rank ends, and so does the output of native
code and of other programs. ``rank_zero/`` decides which ranks are silent.
"""

from __future__ import annotations

import os
import select
import selectors
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from parwrap.errors import LaunchError
from parwrap.launching.failures import Failure
from parwrap.ranks.platform import WINDOWS

__all__ = ["ALL_RANKS", "LOG", "Lines", "Pipes", "RankOutput", "prefixed"]

ALL_RANKS = "PARWRAP_ALL_RANKS"
"""The variable that is 1 if the launcher shows what every rank prints, so that no rank is silent."""

LOG = "PARWRAP_RANK_LOG"
"""The variable with the path of the file for the output of a silent rank; unset without such a file."""

STREAMS = {"out": 1, "err": 2, "log": None}
"""The pipes of a rank: stdout, stderr and one only for its log file, each with the launcher's descriptor for it."""

CAPACITY = 1 << 16
"""Bytes that a pipe holds."""

PROGRESS = 10.0
"""Seconds between two displays of a line that overwrites itself, such as a progress bar."""


@dataclass(frozen=True)
class Pipes:
    """The named pipes into which the ranks of a node write.

    Attributes:
        directory: the directory of the pipes.
        everyone: whether the output of all ranks is shown.
        logged: whether each rank has a log file, so that hidden output is kept too.
    """

    directory: str
    everyone: bool
    logged: bool

    def open(self, local_rank: int) -> None:
        """Redirect this process's output to the pipes, and set the variables that say what happens to a silent rank's output."""
        for stream, number in STREAMS.items():
            if number is not None:
                pipe = os.open(self._path(local_rank, stream), os.O_WRONLY)
                os.dup2(pipe, number)
                os.close(pipe)
        if self.everyone:
            os.environ[ALL_RANKS] = "1"
        elif self.logged:
            os.environ[LOG] = self._path(local_rank, "log")

    def _path(self, local_rank: int, stream: str) -> str:
        return os.path.join(self.directory, f"{local_rank}.{stream}")


class RankOutput:
    """The launcher's end of the pipes: forwards what the ranks of this node write while :meth:`passed_on` is open.

    Args:
        directory: an empty directory for the pipes.
        ranks: the number of ranks on this node.
        everyone: whether to prefix each line with its rank; if not, output is shown as it arrives.
        log_dir: the directory of the ranks' log files; ``None`` for no files.

    Raises:
        LaunchError: ``log_dir`` cannot be created, or this is Windows.
    """

    def __init__(self, directory: Path, ranks: int, everyone: bool, log_dir: str | None) -> None:
        if WINDOWS:
            raise LaunchError(
                "--all-ranks and --log-dir need named pipes, which Windows does not have as files: remove them. With PARWRAP_ALL_RANKS=1 "
                "in the environment, every rank prints, without its number."
            )
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
                raise LaunchError(f"--log-dir {log_dir} cannot be created: {error.strerror}. Choose another directory.") from None

    def rendezvous(self, wrapped: Callable, agent: Any, args: tuple, kwargs: dict) -> None:
        """Run ``wrapped``, the rendezvous of torch's ``agent``, and then :meth:`begin`: from then on the ranks' numbers are known."""
        wrapped(*args, **kwargs)
        self.begin({worker.local_rank: worker.global_rank for worker in agent.get_worker_group().workers})

    def begin(self, ranks: Mapping[int, int]) -> None:
        """Open the log files, if any, appending to existing ones. ``ranks`` has the number of each rank by its local rank."""
        self._ranks = ranks
        if self._log_dir is None:
            return
        for local_rank, rank in ranks.items():
            try:
                file = open(os.path.join(self._log_dir, f"rank_{rank}.log"), "a+b", buffering=0)  # noqa: SIM115
            except OSError as error:
                raise LaunchError(f"--log-dir {self._log_dir} cannot be written to: {error.strerror}. Choose another directory.") from None
            if file.tell():
                _end_line(file)
                file.write(time.strftime("--- started again at %Y-%m-%d %H:%M:%S ---\n").encode())
            self._files[local_rank] = file

    @contextmanager
    def passed_on(self) -> Iterator[None]:
        """Forward the ranks' output inside the block. When the block ends, all of it has been forwarded."""
        with ExitStack() as stack, selectors.DefaultSelector() as selector:
            for path in self._paths:
                # read and write: without a writer, the pipe would be at its end
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

    def close(self, failures: Iterable[Failure]) -> None:
        """Close the log files, after writing into each how its rank failed, if it did; ``failures`` has those of all nodes."""
        texts = {failure.rank: f"{failure}\n" for failure in failures}
        for local_rank, file in self._files.items():
            with file, suppress(OSError):
                file.write(texts.get(self._ranks[local_rank], "").encode(errors="replace"))

    def _passer(self, local_rank: int, shown: int | None) -> Callable[[bytes], None]:
        """A function that handles one rank's output from one of its pipes. It receives empty bytes at the end."""
        lines, ranks = Lines(), self._ranks

        def take(data: bytes) -> None:
            nonlocal ranks
            if ranks is not self._ranks:  # the ranks have been restarted
                if shown is not None and self.pipes.everyone:
                    _write(shown, prefixed(lines.take(b""), ranks.get(local_rank, local_rank)))
                ranks = self._ranks
            if file := self._files.get(local_rank):
                try:
                    file.write(data)
                except OSError as error:
                    del self._files[local_rank]
                    self._report_loss(f"in {file.name}", error)
            if shown is not None and shown not in self._lost:
                try:
                    _write(shown, prefixed(lines.take(data), self._ranks.get(local_rank, local_rank)) if self.pipes.everyone else data)
                except BrokenPipeError:  # the reader has ended
                    self._lost.add(shown)
                except OSError as error:
                    self._lost.add(shown)
                    self._report_loss("shown", error)

        return take

    def _report_loss(self, where: str, error: OSError) -> None:
        """Report the error and keep reading, because ranks would wait forever for a reader."""
        with suppress(OSError):
            print(f"parwrap: from now on, the ranks' output is no longer {where}: {error.strerror}", file=sys.stderr)


class Lines:
    """Assembles whole lines from chunks.

    Of a line that overwrites itself, such as a progress bar, it keeps the final state and a few earlier ones.

    >>> lines = Lines()
    >>> lines.take(b"epoch 1"), lines.take(b", loss 2\\n10%\\r20%\\rdone\\nepo"), lines.take(b"")
    ([], [b'epoch 1, loss 2', b'done'], [b'epo'])
    """

    def __init__(self) -> None:
        self._begun, self._shown = b"", time.monotonic()

    def take(self, data: bytes) -> list[bytes]:
        """The lines completed by ``data``, and at times the state of one that overwrites itself; with empty bytes, the unfinished rest."""
        *whole, self._begun = (self._begun + data).split(b"\n")
        if not data and self._begun:
            whole, self._begun = [self._begun], b""
        lines = [_last(line) for line in whole]
        if b"\r" in self._begun:
            last, returned = _last(self._begun), self._begun.endswith(b"\r")
            if time.monotonic() > self._shown + PROGRESS and last.strip():
                lines.append(last)
                self._shown = time.monotonic()
            self._begun = b"\r" + last + b"\r" * returned  # the next chunk overwrites it then
        return lines


def prefixed(lines: list[bytes], rank: int) -> bytes:
    """``lines``, each prefixed with ``rank``.

    >>> prefixed([b"one", b"two"], 1)
    b'[rank 1] one\\n[rank 1] two\\n'
    """
    return b"".join(b"[rank %d] %s\n" % (rank, line) for line in lines)


def _end_line(file: BinaryIO) -> None:
    """Make ``file``, which is not empty, end with a line break."""
    file.seek(-1, os.SEEK_END)
    if file.read(1) != b"\n":
        file.write(b"\n")


def _write(descriptor: int, text: bytes) -> None:
    while text:
        try:
            text = text[os.write(descriptor, text) :]
        except BlockingIOError:  # other processes that share this terminal may have made it non-blocking
            select.select([], [descriptor], [])


def _last(line: bytes) -> bytes:
    """What a terminal shows of ``line`` at the end: what follows its last carriage return."""
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
            with suppress(BlockingIOError):  # the pipe is empty
                key.data(os.read(key.fd, CAPACITY))  # all ranks have ended: processes that outlive them are not waited for
            key.data(b"")
