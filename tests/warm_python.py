"""A Python that has loaded torch, and forks itself to run commands of parwrap: each test saves the seconds that the loading takes.

Only the loading is done before. A command does all else itself, from its first line on, in a process and a session of its own.
"""

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from parwrap.launching.reexec import ADDED, FOR_RANKS

LOADED = ("torch.distributed.run", "torch._dynamo", "numpy.random", "parwrap.decorators.distributed", "parwrap.strategies.ddp")
"""What a command, its fork server and its ranks load."""

READ_AT_THE_START = ("PYTHON", "OMP_", "KMP_", "LD_", "TORCH")
"""How variables begin that a process reads when it starts or loads torch."""


class Ended(NamedTuple):
    """How a command has ended; ``pid`` is the ID of its process, which leads a session."""

    pid: int
    returncode: int
    stdout: str
    stderr: str


class Command:
    """A command that runs.

    Attributes:
        pid: the ID of its process, which leads a session.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._answers = connection, connection.makefile()
        self.pid = int(self._answers.readline())

    def wait(self, within: float) -> int:
        """Wait for the end, and kill the process with its group after so many seconds. Returns the exit code as :mod:`subprocess` does."""
        self._connection.settimeout(within)
        try:
            return int(self._answers.readline())
        except TimeoutError:
            os.killpg(self.pid, signal.SIGKILL)
            raise
        finally:
            self._answers.close()
            self._connection.close()


class WarmPython:
    """The interpreter, in a process that ends with this one or with :meth:`close`.

    Args:
        environ: the variables of its environment, and of the commands that have none of their own.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = {name: value for name, value in environ.items() if name not in FOR_RANKS}
        self._connection, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, env={**self.environ, **FOR_RANKS}, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            )

    def can_run(self, environ: Mapping[str, str]) -> bool:
        """Whether a new interpreter with the variables ``environ`` would begin as one that is forked from this."""
        read = [
            {name: value for name, value in {**FOR_RANKS, **each}.items() if name.startswith(READ_AT_THE_START)}
            for each in (environ, self.environ)
        ]
        return read[0] == read[1]

    def start(self, module: str, *arguments: str, streams: Sequence[int], cwd: Path, environ: Mapping[str, str] | None = None) -> Command:
        """Start ``python -m MODULE ARGUMENTS``. Commands run one after another.

        Args:
            module: ``parwrap``, or a module in it.
            arguments: its arguments.
            streams: the file descriptors that are its stdin, stdout and stderr.
            cwd: the working directory.
            environ: the variables of its environment.
        """
        environ = self.environ if environ is None else environ
        assert self.can_run(environ), environ
        request = json.dumps([[module, *arguments], os.fspath(cwd), dict(environ)]).encode()
        answers, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._connection, [len(request).to_bytes(4, "big")], [*streams, theirs.fileno()])
        self._connection.sendall(request)
        return Command(answers)

    def run(self, module: str, *arguments: str, cwd: Path, environ: Mapping[str, str] | None = None, within: float = 120) -> Ended:
        """Run ``python -m MODULE ARGUMENTS`` to its end, at most so many seconds; see :meth:`start`."""
        with open(os.devnull) as stdin, tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
            streams = (stdin.fileno(), stdout.fileno(), stderr.fileno())
            command = self.start(module, *arguments, streams=streams, cwd=cwd, environ=environ)
            status = command.wait(within)
            stdout.seek(0)
            stderr.seek(0)
            return Ended(command.pid, status, stdout.read(), stderr.read())

    def close(self) -> None:
        self._connection.close()
        try:
            self._process.wait(10)
        finally:
            self._process.kill()


def _next_command(connection: socket.socket) -> list[str] | None:
    """Wait for the next command, and return it in a process that is forked for it; ``None`` in this process at the end."""
    while True:
        size, descriptors, _, _ = socket.recv_fds(connection, 4, 4)
        if not size:
            return None
        request = connection.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
        *streams, answers = descriptors
        if (pid := os.fork()) == 0:
            os.close(answers)
            _begin(streams, *(asked := json.loads(request))[1:])
            return asked[0]
        for descriptor in streams:
            os.close(descriptor)
        with open(answers, "w", buffering=1) as file, suppress(BrokenPipeError):  # the test has failed
            print(pid, file=file)
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=file)


def _begin(streams: list[int], cwd: str, environ: Mapping[str, str]) -> None:
    """Make this process one that begins, and that the command has restarted with what ranks need."""
    os.setsid()
    for stream, descriptor in enumerate(streams):
        os.dup2(descriptor, stream)
        os.close(descriptor)
    os.chdir(cwd)
    added = {name: value for name, value in FOR_RANKS.items() if name not in environ}
    os.environ.clear()
    os.environ.update({**environ, **added, **({ADDED: " ".join(added)} if added else {})})
    tempfile.tempdir = None  # it follows from the variables
    sys.path[0] = cwd


if __name__ == "__main__":
    for name in LOADED:
        import_module(name)
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        command = _next_command(connection)
    if command is not None:
        sys.orig_argv = [sys.executable, "-m", *command]
        sys.argv[1:] = command[1:]
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
