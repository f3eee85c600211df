"""How a rank's failure reaches the terminal: each rank saves its own failure, and the launcher prints the first failure last.

The user needs to see the error of the first rank. Ranks that fail because of it get one line each.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from traceback import print_exception
from types import TracebackType
from typing import Literal

from parwrap.errors import explain
from parwrap.rank_zero.per_thread import passing
from parwrap.system.processes import signal_name
from parwrap.system.remote_exception import in_one_line

__all__ = ["Failure", "Recorder", "exit_status", "name_of_node", "node_name", "read_failures", "report", "unexplained"]


@dataclass(frozen=True)
class Failure:
    """How a rank failed.

    Attributes:
        rank: the rank's number.
        size: the number of ranks.
        attempt: the number of restarts before it.
        time: the time of the failure, in seconds since the epoch.
        ending: an exception, ``sys.exit`` or similar, or a signal.
        status: the exit code; for a signal 128 plus its number.
        text: the traceback, or the message of ``sys.exit``.
        exception: the exception in one line.
        node: the name of its node; empty with a single node.
    """

    rank: int
    size: int
    attempt: int
    time: float
    ending: Literal["raised", "exited", "killed"]
    status: int
    text: str = ""
    exception: str = ""
    node: str = ""

    def write(self, directory: Path) -> bool:
        """Save this failure in ``directory``, unless the rank has already reported one. Returns whether it is the first."""
        path = directory / f"{self.attempt}-{self.rank}.json"
        if path.exists():
            return False
        part = path.with_suffix(".part")  # the rank may be killed while it writes
        part.write_text(json.dumps(asdict(self)))
        part.rename(path)
        return True

    def __str__(self) -> str:
        if self.ending == "raised":
            return f"{self._who} {'was interrupted' if self.interrupted else 'failed'}:\n{self.text}"
        return f"{self._who} {self.cause}"

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended it."""
        return self.ending == "raised" and self.status == 128 + signal.SIGINT

    @property
    def line(self) -> str:
        """One line that says this rank failed after another."""
        return f"{self._who} failed later: {self.cause}" if self.ending == "raised" else f"{self._who} later {self.cause}"

    @property
    def cause(self) -> str:
        """The cause in one line."""
        if self.ending == "raised":
            return self.exception
        if self.ending == "exited":
            return f"exited with code {self.status}" + (f": {self.text}" if self.text else "")
        name = signal_name(self.status - 128)
        return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")

    @property
    def _who(self) -> str:
        return f"rank {self.rank} of {self.size}" + (f" on {self.node}" if self.node else "")


class Recorder(AbstractContextManager):
    """A context manager that saves the first failure in its block. It can be entered again.

    Args:
        directory: where to write.
        environ: the launch variables of this rank.
        traceback: the part of an exception's traceback to show.
        log_only: the stream that only this rank's log file gets, if it has one.
    """

    def __init__(
        self,
        directory: Path,
        environ: Mapping[str, str],
        traceback: Callable[[BaseException], TracebackType | None],
        log_only: str | None = None,
    ) -> None:
        self._directory, self._traceback, self._log_only = directory, traceback, log_only
        self._rank, self._size, self._attempt = (int(environ[name]) for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
        self._node = name_of_node(environ)
        self._log = Path(environ["TORCHELASTIC_ERROR_FILE"] or os.devnull).with_name("stderr.log")
        self._is_last = self._attempt == int(environ["TORCHELASTIC_MAX_RESTARTS"])
        self._has_failed = False

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if isinstance(error, SystemExit):
            _ignore_handled_signals()
        if error is None or exit_status(error) == 0 or self._has_failed:
            return
        failed_at = time.time()
        self._has_failed = True
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C arrives twice: from the terminal and from the launcher
        failure = Failure(
            rank=self._rank,
            size=self._size,
            attempt=self._attempt,
            time=failed_at,
            ending="exited" if isinstance(error, SystemExit) else "raised",
            status=exit_status(error),
            text=_message(error) if isinstance(error, SystemExit) else self._shown(error),
            exception=in_one_line(error),
            node=self._node,
        )
        with passing():  # on every rank
            try:
                failure.write(self._directory)
                reported = self._is_last or failure.interrupted
            except OSError:  # the disk may be full
                reported = False
            if self._log_only and self._is_last:
                with open(self._log_only, "w") as file:
                    print(failure, file=file)
        # the launcher writes nothing into this rank's log, and does not report earlier attempts, unless Ctrl-C ends this one
        if self._log.exists() or not reported:
            print(failure, file=sys.__stderr__)

    def _shown(self, error: BaseException) -> str:
        """What the script's own ``sys.excepthook`` prints for ``error``, without the rank that torch puts before each line."""
        traceback = self._traceback(error)
        if self._size > 1:
            explain(error)
        with io.StringIO() as text, contextlib.redirect_stderr(text):
            try:
                sys.excepthook(type(error), error.with_traceback(traceback), traceback)
            except Exception:  # the script's hook fails
                print_exception(type(error), error, traceback)
            return text.getvalue().replace(f"[rank{self._rank}]: ", "").rstrip()


def _ignore_handled_signals() -> None:
    """Ignore a signal that the script has handled, because it may arrive twice, from its sender and from the launcher."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if callable(handler := signal.getsignal(number)) and handler is not signal.default_int_handler:
            signal.signal(number, signal.SIG_IGN)


def node_name(number: int, host: str) -> str:
    """The name of a node in messages.

    >>> node_name(1, "gpu7")
    'node 1 (gpu7)'
    """
    return f"node {number} ({host})"


def name_of_node(environ: Mapping[str, str]) -> str:
    """The name of this node, from its ranks' launch variables; empty with a single node."""
    return node_name(int(environ["GROUP_RANK"]), socket.gethostname()) if int(environ.get("GROUP_WORLD_SIZE", 1)) > 1 else ""


def exit_status(error: BaseException) -> int:
    """The exit code of ``python`` when ``error`` ends a script.

    >>> exit_status(SystemExit(3)), exit_status(SystemExit("")), exit_status(ValueError()), exit_status(KeyboardInterrupt())
    (3, 1, 1, 130)
    """
    if not isinstance(error, SystemExit):
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    code = 0 if error.code is None else error.code
    return code & 0xFF if isinstance(code, int) else 1


def read_failures(directory: Path) -> list[Failure]:
    """The failures of the last attempt that had any, in order of time."""
    failures = [Failure(**json.loads(path.read_text())) for path in directory.glob("*.json")]
    last = max((failure.attempt for failure in failures), default=0)
    return sorted((failure for failure in failures if failure.attempt == last), key=lambda failure: failure.time)


def unexplained(environ: dict[str, str], code: int, since: float) -> Failure:
    """The failure of a rank whose process ended with ``code``, after ``since``, without a report; its launch variables identify it."""
    return Failure(
        rank=int(environ["RANK"]),
        size=int(environ["WORLD_SIZE"]),
        attempt=int(environ["TORCHELASTIC_RESTART_COUNT"]),
        time=since,
        ending="exited" if code > 0 else "killed",
        status=code if code > 0 else 128 - code,
        node=name_of_node(environ),
    )


def report(failures: Iterable[Failure], explained: bool = False) -> str:
    """The report for the user: a line for each rank that failed differently, then the first failure in full.

    If the failures are ``explained`` by an earlier message, such as the loss of a node, each gets one line.

    If rank 0 ends with ``sys.exit`` and no rank fails differently, the report is what a single process would print. After Ctrl-C, one rank
    shows where it was.
    """
    first, *others = failures
    if explained:
        return "\n".join(each.line for each in [first, *others])
    if first.interrupted:
        return str(min((each for each in [first, *others] if each.interrupted), key=lambda failure: failure.rank))
    lines = [other.line for other in others if other.cause != first.cause]
    alike = first.ending == "exited" and not lines and 0 in (first.rank, *(other.rank for other in others))
    last = first.text if alike else str(first)
    return "\n".join([*lines, last])


def _message(error: SystemExit) -> str:
    return "" if error.code is None or isinstance(error.code, int) else str(error.code)
