"""Restarts the command in the same process, because an interpreter and OpenMP read some variables only when they start.

Ranks that are forked from the command share its interpreter, so the interpreter must have started with the variables that ranks need. A
script that turns out to be the only rank gets an interpreter without them. ``fork_server.py`` forks the ranks.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping

__all__ = ["ADDED", "FOR_RANKS", "Reexec"]

FOR_RANKS = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
"""Variables that the interpreter must start with if ranks are forked from it. Each rank sets its number of threads itself."""

ADDED = "PARWRAP_RESTARTED"
"""The variable that lists the variables that a restart has added."""


class Reexec:
    """How the command was started, and how to start it again in the same process.

    Args:
        variables: the environment of this process.
        possible: whether this process runs only the command; otherwise it is never restarted.

    Attributes:
        environ: the user's environment, without the variables that a restart has added.
        first: whether the command has not been restarted yet.
        for_ranks: whether it was restarted with what forked ranks need.

    >>> reexec = Reexec({"HOME": "/home", "OMP_NUM_THREADS": "1", "PARWRAP_RESTARTED": "OMP_NUM_THREADS"}, possible=False)
    >>> reexec.first, reexec.for_ranks, reexec.environ
    (False, True, {'HOME': '/home'})
    """

    def __init__(self, variables: Mapping[str, str], possible: bool) -> None:
        self.environ = dict(variables)
        names = self.environ.pop(ADDED, None)
        self._added = (names or "").split()
        for name in self._added:
            del self.environ[name]
        self.first, self.for_ranks = names is None, bool(self._added)
        self._possible = possible

    def with_what_ranks_need(self) -> None:
        """Restart with the variables that forked ranks need, unless the user has set all, or the command has been restarted already."""
        missing = {name: value for name, value in FOR_RANKS.items() if not self.environ.get(name)}
        if self.first and missing:
            self._start_again(missing)

    def as_plain_python(self) -> None:
        """Restart without the variables that a restart has added, if it has added any."""
        if self.for_ranks:
            self._start_again({})

    def clean_environment(self) -> None:
        """Remove from ``os.environ`` the variables that a restart has added; the libraries have read them by now."""
        for name in (ADDED, *self._added):
            os.environ.pop(name, None)

    def _start_again(self, added: Mapping[str, str]) -> None:
        if self._possible and _is_command(sys.orig_argv[: len(sys.orig_argv) - len(sys.argv[1:])]):
            atexit._run_exitfuncs()
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**self.environ, **added, ADDED: " ".join(added)})


def _is_command(before: list[str]) -> bool:
    """Whether the command was started directly, not through a profiler: ``before`` is the command line before the command's own arguments.

    >>> _is_command(["python", "-m", "parwrap.run"]), _is_command(["python", "bin/parwrap", "run"])
    (True, True)
    >>> _is_command(["python", "-m", "cProfile", "-m", "parwrap.run"]), _is_command(["python", "train.py"])
    (False, False)
    """
    options = before[1:]
    while options and options[0].startswith("-") and options[0] != "-m":
        options = options[2 if options[0] in ("-X", "-W") else 1 :]
    if options[-1:] == ["run"]:
        return options[:-1] == ["-m", "parwrap"] or (len(options) == 2 and os.path.basename(options[0]) == "parwrap")
    return options == ["-m", "parwrap.run"]
