"""A launched rank has no stdin: reading from it is an error that says what to do instead."""

from __future__ import annotations

import builtins
import os
import sys
from typing import Any, NoReturn, TextIO, cast

from parwrap.errors import UsageError

__all__ = ["check_opening", "refuse_stdin"]

PATHS = ("/dev/stdin", "/dev/fd/0", "/proc/self/fd/0")

_remedy: str | None = None
"""What to do instead of reading, on a launched rank; ``None`` in other processes."""


def refuse_stdin(remedy: str) -> None:
    """Make reading from stdin raise an error in this process.

    Args:
        remedy: what to do instead of reading, such as ``"pass the answer as an argument"``.
    """
    global _remedy
    _remedy = remedy

    def ask(prompt: object = "") -> NoReturn:
        raise EOFError(f"input({str(prompt)!r}) was called on a launched rank, which has no stdin: {remedy}.")

    builtins.input = ask
    if sys.stdin is not None and not _is_null(0):  # if it is None, stdin was closed, and descriptor 0 may be something else
        unreadable = os.open(os.devnull, os.O_WRONLY)  # as nohup does: ranks that read one stdin would each get a random part
        os.dup2(unreadable, 0)
        os.close(unreadable)
    sys.stdin = cast(TextIO, _NoStdin(sys.stdin, remedy))
    if os.environ.get("PYTHONBREAKPOINT", "") in ("", "pdb.set_trace"):  # another debugger may need no terminal
        sys.breakpointhook = _refuse_breakpoint


def _is_null(descriptor: int) -> bool:
    """Whether ``descriptor`` is the null device, of which all ranks read the same: programs that they start may read it."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(os.devnull))
    except OSError:
        return False


def check_opening(file: Any) -> None:
    """Raise an error if this is a launched rank and ``file``, which is about to be opened, is stdin."""
    if _remedy is not None and (file == 0 if isinstance(file, int) else isinstance(file, (str, os.PathLike)) and str(file) in PATHS):
        raise EOFError(f"open({file!r}) was called on a launched rank, which has no stdin: {_remedy}.")


class _NoStdin:
    """The stdin of a rank: reading from it is an error, and everything else is unchanged."""

    def __init__(self, stdin: TextIO | None, remedy: str) -> None:
        self._stdin, self._remedy = stdin, remedy

    def __getattr__(self, name: str) -> Any:
        if name in ("buffer", "read", "readline", "readlines"):
            self._refuse()
        return getattr(self._stdin, name)

    def __iter__(self) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise EOFError(f"sys.stdin was read on a launched rank, which has no stdin: {self._remedy}.")


def _refuse_breakpoint(*args: Any, **kwargs: Any) -> NoReturn:
    raise UsageError("breakpoint() was called on a launched rank, which has no terminal: debug on one rank, with --nproc-per-node 1.")
