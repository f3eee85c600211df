"""Runs a script on one rank as plain ``python`` would, inside ``distributed`` unless it is only launched.

A single rank uses it too, without a child process. ``agent.py`` starts the ranks, and ``failure_report.py`` reports failures.
"""

from __future__ import annotations

import atexit
import builtins
import gc
import importlib.util
import multiprocessing
import os
import re
import runpy
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import NoReturn, TextIO, cast
from zipfile import is_zipfile

import torch

from parwrap.inline.child_output import refuse_stdin
from parwrap.launching.command.script import Script
from parwrap.launching.elastic.failure_report import Recorder, exit_status
from parwrap.launching.elastic.fork_server import BLOCKED
from parwrap.launching.elastic.forwarded_signals import note_signals
from parwrap.launching.elastic.rank_output import Pipes
from parwrap.system.processes import die_with_parent

__all__ = ["run_alone", "run_rank"]


def run_alone(script: Script) -> None:
    """Run ``script`` in this process and end it as plain ``python`` would, with the same traceback and exit code."""
    try:
        _run(script, nullcontext())
    except SystemExit:
        raise
    except BaseException as error:
        traceback = script_traceback(error)
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
        sys.exit(exit_status(error))


def run_rank(script: Script, variables: Mapping[str, str], threads: int | None, failures: str, pipes: Pipes | None = None) -> NoReturn:
    """Run ``script`` in this process, which was started to be one rank.

    Args:
        script: what to run.
        variables: environment variables to set first.
        threads: the number of compute threads; ``None`` for what torch took from the environment.
        failures: the directory for failure reports.
        pipes: the pipes that replace stdout and stderr.
    """
    die_with_parent()
    if (launcher := multiprocessing.parent_process()) and not launcher.is_alive():  # until then, a signal ends the rank
        os._exit(1)
    log_only = pipes.open(int(os.environ["LOCAL_RANK"])) if pipes else None
    os.environ.update(variables)
    if threads is not None:
        torch.set_num_threads(threads)  # OpenMP has read the variable in the fork server
    _forget_the_fork()
    note_signals(Path(failures))
    refuse_stdin("pass the answer as an argument of the script")
    status = 0
    recorder = Recorder(Path(failures), os.environ, script_traceback, log_only)
    ending = _Ending()
    try:
        with recorder:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED)
            _run(script, recorder, ending)
    except BaseException as error:
        status = exit_status(error)
    with ending.replica():
        _end_like_an_interpreter()
    sys.exit(status or None)  # torch's agent makes a process wait after status 0


def script_traceback(error: BaseException) -> TracebackType | None:
    """The traceback of ``error``, starting at the script's first line, as plain ``python`` shows it."""
    traceback = error.__traceback__
    while traceback and traceback.tb_frame.f_code.co_filename.startswith((__file__, runpy.__file__, signal.__file__, "<frozen ")):
        traceback = traceback.tb_next
    return traceback


class _Ending:
    """What runs at the end of a script: threads and exit handlers inside its scope, and each ``__del__`` after it, under the same rules."""

    _rank = 0

    @contextmanager
    def reached(self) -> Iterator[None]:
        """Wrap the script inside its scope: if it succeeds, run threads and exit handlers before the scope closes."""
        try:
            yield
        except BaseException as error:
            self._note_replica()
            if exit_status(error) == 0:
                _run_exit_handlers()
            raise
        self._note_replica()
        _run_exit_handlers()

    def _note_replica(self) -> None:
        from parwrap.api.distributed import parts

        if shared := parts():
            self._rank = shared.group.world.rank

    @contextmanager
    def replica(self) -> Iterator[None]:
        """After the scope, ranks other than 0 write no files and print nothing, unless every rank was a separate run."""
        if not self._rank:
            yield
            return
        from parwrap.intercept.table import intercepting
        from parwrap.rank_zero.output import RankZeroOutput
        from parwrap.rank_zero.private_files import PrivateFiles

        with RankZeroOutput(self._rank).silenced(), intercepting([files := PrivateFiles(self._rank)]):
            yield
        files.close()


def _run(script: Script, recorder: AbstractContextManager, ending: _Ending | None = None) -> None:
    if script.kind == "program":
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)  # Python ignores them, and other programs would inherit that
        os.execvp(script.target, [script.target, *script.args])
    local_rank = _local_rank_option(script) if script.hand_local_rank else []
    sys.argv[:] = [script.target, *local_rank, *script.args]
    # save the failure before the scope closes, because leaving the process group may end the other ranks
    with _scope(script), ending.reached() if ending and script.scope is not None else nullcontext(), recorder, _errors_noted(script):
        if script.kind == "module":
            runpy.run_module(script.target, run_name="__main__", alter_sys=True)
        elif Path(script.target).is_dir() or is_zipfile(script.target):
            runpy.run_path(os.path.abspath(script.target), run_name="__main__")
        else:
            _run_file(script.target)


@contextmanager
def _scope(script: Script) -> Iterator[None]:
    if script.scope is None:
        yield
        return
    import parwrap
    from parwrap.api.distributed import distributed

    with distributed.script_scope(**script.scope), ExitStack() as scopes:
        features = [getattr(parwrap, name)(**options) for name, options in script.features.items()]
        for feature in sorted(features, key=lambda feature: feature.layer):
            scopes.enter_context(feature)
        yield


def _errors_noted(script: Script) -> AbstractContextManager:
    if script.scope is None:
        return nullcontext()
    from parwrap.api.distributed import errors_noted

    return errors_noted()


def _run_file(path: str) -> None:
    """Like ``runpy.run_path``, but ``__main__`` is kept for exit handlers, and ``sys.argv[0]`` is unchanged."""
    main = ModuleType("__main__")
    main.__file__ = os.path.abspath(path)
    main.__loader__ = loader = SourceFileLoader("__main__", main.__file__)
    vars(main).update(__builtins__=builtins, __cached__=None)
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    sys.modules["__main__"] = main
    exec(loader.source_to_code(loader.get_data(main.__file__), main.__file__), vars(main))


def _local_rank_option(script: Script) -> list[str]:
    """The local rank as an argument, spelled as in the script's source, if it has such an option."""
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
        if callable(signal.getsignal(number)):  # the launcher's handle, after it forked itself
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if sys.stdout is not None:  # it was closed
        cast(TextIO, sys.stdout).reconfigure(line_buffering=True)  # type: ignore[attr-defined]  # a rank may be killed at any time
    if os.environ["WORLD_SIZE"] == "1":
        gc.unfreeze()  # it may launch ranks, and must receive their results
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # otherwise all ranks would continue from the fork server's random state


def _run_exit_handlers() -> None:
    """Wait for the script's threads, then run its ``atexit`` handlers, as an interpreter does at its end."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def _end_like_an_interpreter() -> None:
    """Do what multiprocessing skips at the end of a process: threads, exit handlers, objects with pending writes."""
    _run_exit_handlers()
    if not any(thread.daemon for thread in threading.enumerate()):  # a running thread would lose its globals
        vars(sys.modules["__main__"]).clear()
        gc.collect()
