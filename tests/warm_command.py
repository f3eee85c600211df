"""``python -m parwrap.run`` from a process that has loaded torch: what the command does is the same, and a start takes a tenth of the time.

The process that has loaded it, one for each pytest, forks the command. Where an interpreter's own start matters, the command is started for
real: on one rank, on several nodes, with options of the interpreter or with variables that torch reads when it is loaded.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import runpy
import selectors
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

from parwrap.launching.command.reexec import ADDED, FOR_RANKS

__all__ = ["Command", "run"]

PRELOADED = ("torch.distributed.run", "torch._dynamo", "numpy.random", "parwrap.api.distributed", "parwrap.launching.elastic.agent")


class Command(subprocess.Popen):
    """A :class:`subprocess.Popen` that forks ``python -m parwrap.run`` from a process that has loaded torch, where that is the same."""

    _connection: socket.socket | None = None

    def _execute_child(self, *given: Any) -> None:
        args, _, preexec_fn, _, pass_fds, cwd, env, *rest = given
        environ = {**(os.environ if env is None else env)}
        if preexec_fn or pass_fds or not _may_be_forked(list(map(str, args)), environ):
            super()._execute_child(*given)  # type: ignore[misc]
            return
        stdin, _, _, stdout, _, stderr = pipes = rest[3:9]
        new_session = rest[14]
        added = {name: value for name, value in FOR_RANKS.items() if name not in environ}
        request = {
            "arguments": [str(each) for each in args[1:]],
            "cwd": os.path.abspath(cwd or "."),
            "environ": {**environ, **added, **({ADDED: " ".join(added)} if added else {})},
            "new_session": bool(new_session),
        }
        server = _server()
        self._connection, its_end = socket.socketpair()
        streams = [own if given == -1 else given for own, given in enumerate((stdin, stdout, stderr))]
        with its_end:
            socket.send_fds(server, [json.dumps(request).encode()], [its_end.fileno(), *streams])
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
        self.pid = int(self._connection.recv(64))
        self._child_created = True

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._connection is None:
            return super()._try_wait(wait_flags)  # type: ignore[misc]
        self._connection.setblocking(not wait_flags & os.WNOHANG)
        try:
            return self.pid, int(self._connection.recv(64))
        except BlockingIOError:
            return 0, 0

    def _internal_poll(self, *args: Any, **kwargs: Any) -> int | None:
        if self._connection is None:
            return super()._internal_poll(*args, **kwargs)  # type: ignore[misc]
        if self.returncode is None:
            with self._waitpid_lock:  # type: ignore[attr-defined]
                if self.returncode is None:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid:
                        self._handle_exitstatus(status)  # type: ignore[attr-defined]
        return self.returncode


def run(command: Sequence[str], timeout: float = 100, check: bool = False, **options: Any) -> subprocess.CompletedProcess[str]:
    """As :func:`subprocess.run` with captured text."""
    with Command(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    ended = subprocess.CompletedProcess(command, process.returncode, stdout, stderr)
    if check:
        ended.check_returncode()
    return ended


def _may_be_forked(command: list[str], environ: dict[str, str]) -> bool:
    if command[1:3] != ["-m", "parwrap.run"] or command[0] != sys.executable:
        return False
    given = " ".join(command)
    if not re.search(r" --nproc-per-node[ =][2-9]", given) or re.search(r"--nnodes|--rdzv|--launcher|--start-method|--dry-run", given):
        return False
    others = {name for name in environ if name.startswith(("PYTHON", "TORCH", "OMP_", "MKL_", "LD_"))} - {"PYTHONPATH"}
    return all(environ[name] == os.environ.get(name, FOR_RANKS.get(name)) for name in others)


@cache
def _server() -> socket.socket:
    ours, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    with its_end:
        # no frame of it is a script's, as in a command that an interpreter has started
        code = f"del __name__; exec(compile(open({__file__!r}).read(), '<frozen warm_command>', 'exec'), {{'__name__': '__main__'}})"
        command = [sys.executable, "-c", code, str(its_end.fileno())]
        subprocess.Popen(command, env={**os.environ, **FOR_RANKS}, pass_fds=[its_end.fileno()], stdin=subprocess.DEVNULL)
    return ours


def _serve(requests: socket.socket) -> None:
    """Fork commands until pytest closes the connection."""
    for name in PRELOADED:
        import_module(name)
    assert threading.active_count() == 1
    selector = selectors.DefaultSelector()
    selector.register(requests, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is not requests:  # a command has ended
                selector.unregister(key.fileobj)
                os.close(key.fd)
                pid, connection = key.data
                _, status = os.waitpid(pid, 0)
                with connection:
                    connection.send(str(status).encode())
                continue
            message, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 4)
            if not message:
                return
            pid = os.fork()
            if not pid:
                _become(json.loads(message), descriptors[1:])
            for descriptor in descriptors[1:]:
                os.close(descriptor)
            connection = socket.socket(fileno=descriptors[0])
            connection.send(str(pid).encode())
            selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, connection))


def _become(request: dict[str, Any], streams: list[int]) -> None:
    """In the forked process: be the command that was asked for, to its end."""
    status = 1
    try:
        if request["new_session"]:
            os.setsid()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.closerange(3, 1 << 10)
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            by_line = number == 2 or (number == 1 and os.isatty(number))
            opened = os.fdopen(number, "w" if number else "r", 1 if by_line else -1, encoding="utf-8", closefd=False)
            setattr(sys, name, opened)
            setattr(sys, f"__{name}__", opened)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["environ"])
        _, module, *arguments = request["arguments"]
        sys.argv[:] = ["-m", *arguments]
        sys.orig_argv[:] = [sys.executable, *request["arguments"]]
        sys.path[:0] = [os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            runpy._run_module_as_main(module)  # type: ignore[attr-defined]
            status = 0
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
            if not isinstance(ended.code, int | None):
                print(ended.code, file=sys.stderr)
        except BaseException:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


if __name__ == "__main__":
    sys.path.pop(0)
    _serve(socket.socket(fileno=int(sys.argv[1])))
