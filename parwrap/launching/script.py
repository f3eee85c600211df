"""What a rank does: it runs the script as plain ``python`` would, inside the ``distributed`` scope unless it is only launched.

A single rank uses it too, without a child process. ``agent.py`` starts the ranks, and ``failures.py`` reports failures.
"""

from __future__ import annotations

import atexit
import builtins
import gc
import importlib.util
import multiprocessing
import os
import pkgutil
import re
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec
from io import BytesIO
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import NoReturn, TextIO, cast
from zipfile import is_zipfile

import torch

from parwrap.launching.failures import Recorder, exit_status, unfinished
from parwrap.launching.fork_server import BLOCKED
from parwrap.launching.numa import bind
from parwrap.launching.output import ALL_RANKS, LOG, Pipes
from parwrap.launching.plan import Script
from parwrap.launching.signals import Terminated, note_signals, raise_on_sigterm, terminate
from parwrap.ranks.device import see_only
from parwrap.ranks.platform import WINDOWS, known_signals
from parwrap.ranks.processes import die_with_parent, forks_end_here
from parwrap.ranks.stdin import refuse_stdin
from parwrap.ranks.world import INIT_METHOD, launch_variables

__all__ = ["run_alone", "run_exit_handlers", "run_rank", "run_target"]


def run_alone(script: Script) -> None:
    """Run ``script`` in this process. If it fails, end with the traceback and exit code of plain ``python``."""
    try:
        _run(script, nullcontext())
    except SystemExit:
        raise
    except BaseException as error:
        traceback = script_traceback(error)
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
        sys.exit(exit_status(error))


def run_rank(
    script: Script,
    variables: Mapping[str, str],
    threads: int | None,
    failures: str,
    pipes: Pipes | None = None,
    gpus: Sequence[str] = (),
    cores: Sequence[set[int]] = (),
) -> NoReturn:
    """Run ``script`` in this process, which was started to be one rank.

    Args:
        script: what to run.
        variables: environment variables to set first.
        threads: the number of compute threads; ``None`` for what torch took from the environment.
        failures: the directory for failure reports.
        pipes: the pipes that replace stdout and stderr.
        gpus: the GPUs of this node, which its ranks divide among them; empty if the script chooses, or there are none.
        cores: the cores near each of ``gpus``; empty to bind no rank.
    """
    die_with_parent()
    if (launcher := multiprocessing.parent_process()) and not launcher.is_alive():  # until then, a signal ends the rank
        os._exit(1)
    os.environ.update(variables)
    if gpus and os.environ["WORLD_SIZE"] != "1":  # a single rank may use them all
        threads = _take_place(gpus, cores, threads)
    if INIT_METHOD in variables:  # torch's agent sets the address of a port that does not exist
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
    if pipes:
        pipes.open(int(os.environ["LOCAL_RANK"]))
    if threads is not None:
        torch.set_num_threads(threads)  # OpenMP has read the variable in the fork server
    _forget_the_fork()
    note_signals(Path(failures))
    refuse_stdin("pass the answer as an argument of the script")
    is_replica = script.scope is not None and os.environ["RANK"] != "0"
    error: BaseException | None = None
    recorder = Recorder(Path(failures), os.environ, script_traceback)
    runs = unfinished(Path(failures), os.getpid())
    if script.scope is not None:
        runs.touch()
    try:
        with recorder:
            if script.scope is not None:
                raise_on_sigterm()
            if BLOCKED:  # by the fork server
                signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED)
            _run(script, recorder, ending=nullcontext() if script.scope is None else _running_exit_handlers())
    except BaseException as raised:
        error = raised
    runs.unlink(missing_ok=True)
    status = 0 if error is None else exit_status(error)
    if script.scope is None or not (is_replica or status):
        _end_like_an_interpreter()
        sys.exit(status or None)  # torch's agent makes a process wait after status 0
    _leave_hard(status, is_replica, by_sigterm=isinstance(error, Terminated))


def _take_place(gpus: Sequence[str], cores: Sequence[set[int]], threads: int | None) -> int | None:
    """Hide the other GPUs, and bind this rank to the cores near its own. Returns how many of ``threads`` these leave it."""
    mine, ranks = int(os.environ["LOCAL_RANK"]) % len(gpus), int(os.environ["LOCAL_WORLD_SIZE"])
    see_only(gpus[mine])
    if not cores:
        return threads
    bind(cores[mine])
    there = sum(cores[rank % len(gpus)] == cores[mine] for rank in range(ranks))
    return threads and min(threads, max(1, len(cores[mine]) // there))


def script_traceback(error: BaseException) -> TracebackType | None:
    """The traceback of ``error`` as plain ``python`` shows it: without the frames that run the script; ``None`` if no other is left."""
    traceback = error.__traceback__
    while traceback and traceback.tb_frame.f_code.co_filename.startswith((__file__, runpy.__file__, signal.__file__, "<frozen ")):
        traceback = traceback.tb_next
    return traceback


@contextmanager
def _running_exit_handlers() -> Iterator[None]:
    """If the script in the block succeeds, wait for its threads and run its exit handlers, before the scope around the block closes."""
    try:
        yield
    except BaseException as error:
        if exit_status(error) == 0:
            run_exit_handlers()
        raise
    run_exit_handlers()


def _run(script: Script, recorder: AbstractContextManager, ending: AbstractContextManager = nullcontext()) -> None:  # noqa: B008
    if script.kind == "program":
        for number in known_signals("SIGPIPE", "SIGXFSZ"):
            signal.signal(number, signal.SIG_DFL)  # Python ignores them, and other programs would inherit that
        if WINDOWS:  # which replaces no process
            sys.exit(subprocess.call([script.target, *script.args]))
        os.execvp(script.target, [script.target, *script.args])
    local_rank = _local_rank_option(script) if script.hand_local_rank else []
    sys.argv[:] = [script.target, *local_rank, *script.args]
    # save the failure before the scope closes, because leaving the process group may end the other ranks
    with _scope(script), ending, recorder, _decorators(script), _explained(script), forks_end_here():
        run_target(script.kind, script.target)


def run_target(kind: str, target: str) -> None:
    """Run ``target``, a module, file, or directory or zip file with a ``__main__``, as plain ``python`` does."""
    if kind == "module":
        try:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        except ImportError as error:
            if script_traceback(error) is None:  # there is no such module, or it cannot be executed
                sys.exit(f"{sys.executable}: {error}")
            raise
    elif Path(target).is_dir() or is_zipfile(target):
        _run_application(os.path.abspath(target))
    else:
        _run_file(target)


def _explained(script: Script) -> AbstractContextManager:
    if script.scope is None:
        return nullcontext()
    from parwrap.decorators.distributed import explained

    return explained(launch_variables())


@contextmanager
def _scope(script: Script) -> Iterator[None]:
    if script.scope is None:
        yield
        return
    from parwrap.decorators.distributed import script_scope

    log, heard = os.environ.pop(LOG, None), os.environ.pop(ALL_RANKS, "") == "1"  # not for what the script starts
    with script_scope(log=log, heard=heard, quiet=script.quiet, **script.scope):
        yield


@contextmanager
def _decorators(script: Script) -> Iterator[None]:
    """Open the decorators that the command line asks for. If one of them raises an error, it counts as an error of the script."""
    import parwrap

    with ExitStack() as around:
        opened = (getattr(parwrap, name)(*given.args, **given.kwargs) for name, given in script.decorators.items())
        for decorator in sorted(opened, key=lambda each: each.layer):
            decorator.of_command = True
            around.enter_context(decorator)
        yield


def _run_application(path: str) -> None:
    """Run the ``__main__`` in the directory or zip file at ``path``, which becomes the first entry of ``sys.path``."""
    sys.path[: not getattr(sys.flags, "safe_path", False)] = [path]
    finder = pkgutil.get_importer(path)
    spec = finder.find_spec("__main__") if finder else None
    if spec is None:
        sys.exit(f"{sys.executable}: can't find '__main__' module in {path!r}")
    _run_as_main(module_from_spec(spec), cast(CodeType, cast(SourceFileLoader, spec.loader).get_code("__main__")))


def _run_file(path: str) -> None:
    """Like ``runpy.run_path``, but ``__main__`` is kept for exit handlers, and ``sys.argv[0]`` is unchanged."""
    main = ModuleType("__main__")
    main.__file__ = os.path.abspath(path)
    main.__loader__ = loader = SourceFileLoader("__main__", main.__file__)
    vars(main).update(__cached__=None)
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    data = loader.get_data(main.__file__)
    _run_as_main(main, pkgutil.read_code(BytesIO(data)) or loader.source_to_code(data, main.__file__))  # a .pyc file, or a source


def _run_as_main(main: ModuleType, code: CodeType) -> None:
    vars(main).update(__builtins__=builtins)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main  # the second name is that of its classes in spawned processes
    exec(code, vars(main))


def _local_rank_option(script: Script) -> list[str]:
    """The option that passes the local rank, spelled as in the script's source; empty if the script has no such option."""
    spelling = re.search(r"--local[-_]rank\b", _source(script))
    return [f"{spelling[0]}={os.environ['LOCAL_RANK']}"] if spelling else []


def _source(script: Script) -> str:
    if script.kind == "file":
        return Path(script.target).read_text(errors="replace") if Path(script.target).is_file() else ""
    spec = importlib.util.find_spec(script.target)
    if spec and spec.submodule_search_locations:
        spec = importlib.util.find_spec(f"{script.target}.__main__")
    return (cast(SourceFileLoader, spec.loader).get_source(spec.name) if spec else None) or ""


def _forget_the_fork() -> None:
    """Hide from a script that multiprocessing started its process."""
    multiprocessing.set_start_method(None, force=True)  # otherwise loaders would start their workers in the way this rank was started
    multiprocessing.current_process().name = "MainProcess"
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):  # a handler of the launcher, which a forked rank inherits
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if sys.stdout is not None:  # None if it was closed
        cast(TextIO, sys.stdout).reconfigure(line_buffering=True)  # type: ignore[attr-defined]  # a rank may be killed at any time
    if os.environ["WORLD_SIZE"] == "1":
        gc.unfreeze()  # it may launch ranks, and must receive their results
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # otherwise all ranks would continue from the fork server's random state


def run_exit_handlers() -> None:
    """Wait for the script's threads, then run its ``atexit`` handlers, as an interpreter does at its end."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def _end_like_an_interpreter() -> None:
    """Do what multiprocessing skips at the end of a process: threads, exit handlers, objects with pending writes."""
    run_exit_handlers()
    if not any(thread.daemon for thread in threading.enumerate()):  # a running thread would lose its globals
        vars(sys.modules["__main__"]).clear()
        gc.collect()


def _leave_hard(status: int, is_replica: bool, by_sigterm: bool) -> NoReturn:
    """End this rank at once, without its threads and what it has left in memory.

    Exit handlers run here only on rank 0. On other ranks their output does not count, and they ran in the scope unless the script failed.
    """
    if signal.getsignal(signal.SIGTERM) is terminate:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher waits
    with suppress(BaseException):  # the failure is recorded
        if not is_replica:
            atexit._run_exitfuncs()
        for child in multiprocessing.active_children():
            child.terminate()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    if by_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    os._exit(status)
