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
from dataclasses import asdict, dataclass, fields
from os import close, rename, write
from os import open as open_descriptor
from pathlib import Path
from traceback import print_exception, walk_tb
from types import TracebackType
from typing import Any, Literal

from parwrap.checks.same_step import LOST
from parwrap.errors import LaunchError, LockstepError, explain, in_one_line
from parwrap.launching.signals import Terminated, terminate
from parwrap.places import Place, from_script, is_ours
from parwrap.ranks.processes import signal_name

__all__ = [
    "Failure",
    "Recorder",
    "causes_first",
    "exit_status",
    "name_of_node",
    "node_name",
    "read_failures",
    "report",
    "unexplained",
    "unfinished",
]


@dataclass(frozen=True)
class Failure:
    """How a rank failed.

    Attributes:
        rank: the rank's number.
        size: the number of ranks.
        attempt: the number of restarts before it.
        time: the time of the failure, in seconds since the epoch.
        ending: ``"raised"``: an exception; ``"exited"``: ``sys.exit`` or similar; ``"killed"``: a signal; ``"left"``: exit code 0 before
            the end of the script.
        status: the exit code; for a signal 128 plus its number, for ``"left"`` 1.
        text: the traceback, or the message of ``sys.exit``.
        exception: the exception in one line; empty if the rank ended without a report.
        place: the line of the script that raised it; empty if there is none.
        node: the name of its node; empty with a single node.
    """

    rank: int
    size: int
    attempt: int
    time: float
    ending: Literal["raised", "exited", "killed", "left"]
    status: int
    text: str = ""
    exception: str = ""
    place: str = ""
    node: str = ""

    @classmethod
    def checked(cls, values: Any) -> Failure:
        """The failure with ``values``, which another node has sent.

        Raises:
            LaunchError: a value is missing or has another type.

        >>> Failure.checked({"rank": "../1"})
        Traceback (most recent call last):
        parwrap.errors.LaunchError: another node reported a failure in another form: start the same version of parwrap on all nodes.
        """
        kinds = {"int": int, "float": float, "str": str}
        if not isinstance(values, dict) or any(
            type(values.get(field.name)) is not kinds.get(str(field.type), str) for field in fields(cls)
        ):
            raise LaunchError("another node reported a failure in another form: start the same version of parwrap on all nodes.")
        return cls(**{field.name: values[field.name] for field in fields(cls)})

    def write(self, directory: Path) -> bool:
        """Save this failure in ``directory``, unless the rank has already reported one in this attempt. Returns whether it is the first.

        A rank may call this inside its scope: it bypasses the patched file calls, with which ranks above 0 write to scratch.
        """
        path = directory / f"{self.attempt}-{self.rank}.json"
        if path.exists():
            return False
        part = path.with_suffix(".part")  # the rank may be killed while it writes
        descriptor = open_descriptor(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            text = json.dumps(asdict(self)).encode()
            while text:
                text = text[write(descriptor, text) :]
        finally:
            close(descriptor)
        rename(part, path)
        return True

    def __str__(self) -> str:
        if self.ending == "raised":
            return f"{self._who} {'was interrupted' if self.interrupted else 'failed'}:\n{self.text}"
        return f"{self._who} {self.cause}"

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended the rank."""
        return self.ending == "raised" and self.status == 128 + signal.SIGINT

    @property
    def lost_another(self) -> bool:
        """Whether another rank may have caused the failure: the ranks had come apart, or a connection was lost."""
        return self.exception.startswith(LockstepError.__name__) or any(text in self.exception for text in LOST)

    @property
    def line(self) -> str:
        """One line that says this rank failed after another."""
        if self.ending != "raised":
            return f"{self._who} later {self.cause}"
        return f"{self._who} failed later{f' at {self.place}' if self.place else ''}: {self.cause}"

    @property
    def cause(self) -> str:
        """The cause in one line."""
        if self.ending == "raised":
            return self.exception
        if self.ending == "exited":
            return f"exited with code {self.status}" + (f": {self.text}" if self.text else "")
        if self.ending == "left":
            return (
                "ended with code 0 before the end of the script, and other ranks went on without it: "
                "call sys.exit() instead of os._exit(0), on all ranks"
            )
        name = signal_name(self.status - 128)
        return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")

    @property
    def _who(self) -> str:
        return f"rank {self.rank} of {self.size}" + (f" on {self.node}" if self.node else "")


class Recorder(contextlib.AbstractContextManager):
    """A context manager that saves the first failure in its block. It can be entered again inside its block.

    Args:
        directory: where to write.
        environ: the launch variables of this rank.
        traceback: a function that returns the part of an exception's traceback to show.
    """

    def __init__(self, directory: Path, environ: Mapping[str, str], traceback: Callable[[BaseException], TracebackType | None]) -> None:
        self._directory, self._traceback = directory, traceback
        self._rank, self._size, self._attempt = (int(environ[name]) for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
        self._node = name_of_node(environ)
        self._log = Path(environ["TORCHELASTIC_ERROR_FILE"] or os.devnull).with_name("stderr.log")
        self._is_last = self._attempt == int(environ["TORCHELASTIC_MAX_RESTARTS"])
        self._has_failed = False
        self._stderr: int | None = None
        with contextlib.suppress(OSError):  # stderr was closed
            self._stderr = os.dup(2)  # inside the scope, ranks above 0 write to their log or nowhere

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if isinstance(error, SystemExit):
            _ignore_handled_signals()
        if error is None or isinstance(error, Terminated) or exit_status(error) == 0 or self._has_failed:
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
            exception=in_one_line(error).removesuffix(":"),
            place=_place(error),
            node=self._node,
        )
        try:
            failure.write(self._directory)
            said = ""
            # the launcher does not report earlier attempts, unless Ctrl-C ends this one
            if not (self._is_last or failure.interrupted):
                said = failure.line if failure.lost_another else str(failure)
        except OSError:  # the disk may be full
            said = str(failure)
        if self._log.exists():  # the launcher writes nothing into torchrun's logs
            said = str(failure)
        if said and self._stderr is not None:
            write(self._stderr, f"{said}\n".encode(errors="replace"))

    def _shown(self, error: BaseException) -> str:
        """What the script's own ``sys.excepthook`` prints for ``error``, without the rank that torch puts before each line."""
        traceback = self._traceback(error)
        if self._size > 1:
            explain(error)
            if isinstance(error, KeyboardInterrupt):  # also of another rank, whose connection may have closed first
                error.__suppress_context__ = True
                _end_in_the_script(traceback)
        with io.StringIO() as text, contextlib.redirect_stderr(text):
            with contextlib.suppress(SystemExit):  # a hook may exit
                try:
                    sys.excepthook(type(error), error.with_traceback(traceback), traceback)
                except Exception:  # the script's hook fails
                    text.seek(text.truncate(0))
            if not text.getvalue():  # or writes to a log
                print_exception(type(error), error, traceback)
            return text.getvalue().replace(f"[rank{self._rank}]: ", "").rstrip()


def _end_in_the_script(traceback: TracebackType | None) -> None:
    """Cut from ``traceback`` the frames of torch and parwrap inside of the last other one: an interrupt says where the script was."""
    last, at = None, traceback
    while at is not None:
        if not is_ours(at.tb_frame.f_code.co_filename):
            last = at
        at = at.tb_next
    if last is not None:
        last.tb_next = None


def _place(error: BaseException) -> str:
    """The innermost line of the script in the traceback of ``error``; empty if it has none."""
    with contextlib.suppress(OSError):  # the working directory was removed
        for frame, line in reversed(list(walk_tb(error.__traceback__))):
            if from_script(frame):
                return str(Place(frame.f_code.co_filename, line))
    return ""


def _ignore_handled_signals() -> None:
    """Ignore a signal that the script has handled, because it may arrive twice, from its sender and from the launcher."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if callable(handler := signal.getsignal(number)) and handler not in (signal.default_int_handler, terminate):
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
    """The failures of the last attempt that had any, causes first.

    A rank that ended without a report, such as one that was killed, comes first, unless SIGABRT ended it. The others follow in order of
    time.
    """
    failures = [Failure(**json.loads(path.read_text())) for path in directory.glob("*.json")]
    last = max((failure.attempt for failure in failures), default=0)
    return sorted((failure for failure in failures if failure.attempt == last), key=causes_first)


def causes_first(failure: Failure) -> tuple[bool, float]:
    """A sort key: the failure that caused the others comes first."""
    aborted = failure.status == 128 + signal.SIGABRT  # torch itself gave up, perhaps because of another rank
    return bool(failure.exception) or aborted, failure.time


def unfinished(directory: Path, process: int) -> Path:
    """The path of a file in ``directory`` that exists until the rank with this process id has reached the end of its script."""
    return directory / f"unfinished-{process}"


def unexplained(environ: Mapping[str, str], code: int) -> Failure:
    """The failure of a rank whose process ended with ``code`` just now, without a report; its launch variables identify it."""
    return Failure(
        rank=int(environ["RANK"]),
        size=int(environ["WORLD_SIZE"]),
        attempt=int(environ["TORCHELASTIC_RESTART_COUNT"]),
        time=time.time(),
        ending="exited" if code > 0 else "killed" if code < 0 else "left",
        status=code if code > 0 else 128 - code if code < 0 else 1,
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
