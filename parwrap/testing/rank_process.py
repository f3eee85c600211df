"""One rank of a test with the mark ``ranks``: the code in the rank's own process.

It loads the test again, runs it inside a gloo process group and sends a :class:`Report` back. ``rank_launcher.py`` starts, watches and ends
the ranks. Every pytest run of every user loads this file, so it imports torch late.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import io
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import pytest
from _pytest import assertion
from _pytest._io import TerminalWriter
from _pytest.assertion.rewrite import AssertionRewritingHook
from _pytest.python import importtestmodule
from _pytest.terminal import TerminalReporter

from parwrap.testing.builtin_fixtures import opened

__all__ = ["Report", "Task", "minimal_pytest", "run"]


@dataclass(frozen=True)
class Task:
    """The task of one rank.

    Attributes:
        rank: this rank, from 0.
        size: the number of ranks.
        folder: the folder for the rendezvous, output and stacks; one for each test.
        module: the file of the test.
        names: the attributes that lead from the module to the test: its classes, if any, and itself.
        values: the test's arguments by name, the attributes of its ``self`` by name, and the warning filters; pickled.
        pytest_options: the command line with which asserts are rewritten and failures are shown as in the parent.
        environ: the environment variables.
        start_method: multiprocessing's default, ``None`` until it is fixed.
        capture: whether output goes to :meth:`output` rather than to the terminal.
    """

    rank: int
    size: int
    folder: Path
    module: Path
    names: tuple[str, ...]
    values: bytes
    pytest_options: tuple[str, ...]
    environ: dict[str, str]
    start_method: str | None
    capture: bool

    def output(self, stream: str) -> Path:
        """The file with the rank's output to ``stream``, ``"stdout"`` or ``"stderr"``."""
        return self.folder / f"{stream}-{self.rank}"

    @property
    def stacks(self) -> Path:
        """The file with the Python stacks of the rank, after ``SIGQUIT`` or a crash."""
        return self.folder / f"stacks-{self.rank}"

    def stacks_of(self, child: int | str) -> Path:
        """The file with the Python stacks of a forked process of the rank, such as a worker of a ``DataLoader``."""
        return self.folder / f"{self.stacks.name}-{child}"

    def dump_stacks(self, path: Path) -> None:
        """Make this process write its stacks to the file at ``path`` on ``SIGQUIT`` or a crash."""
        file = path.open("w")
        faulthandler.enable(file)
        faulthandler.register(signal.SIGQUIT, file)


@dataclass(frozen=True)
class Report:
    """How a rank's test ended.

    Attributes:
        rank: the rank.
        outcome: ``"died"`` stands for a process that sent no report.
        time: when the test ended, in seconds since the epoch.
        headline: the exception, the reason of a skip or how the process died, in one line.
        text: the traceback, as pytest shows it.
    """

    rank: int
    outcome: Literal["passed", "skipped", "xfailed", "failed", "died"]
    time: float
    headline: str = ""
    text: str = ""


def run(task: Task, connection: Connection) -> None:
    """Run the test of ``task`` in this process and send its :class:`Report` through ``connection``."""
    __tracebackhide__ = True
    gc.freeze()  # the collector skips what the fork server has loaded, so its memory is not copied
    os.setpgid(0, 0)  # processes that the test starts are killed with it
    multiprocessing.set_start_method(task.start_method, force=True)
    threading.Thread(target=_end_with_pytest, daemon=True).start()
    if task.capture:
        _redirect_output(task)
    task.dump_stacks(task.stacks)
    os.register_at_fork(after_in_child=lambda: task.dump_stacks(task.stacks_of(os.getpid())))
    config = minimal_pytest(task.pytest_options)
    os.environ.clear()
    os.environ.update(task.environ)
    tempfile.tempdir = None  # the fork server may have cached a folder that its own environment names
    held = ExitStack()
    try:
        test, arguments, filters = _load(task, config)
        held.enter_context(_group_opened(task))
        with warnings.catch_warnings(), _comparisons_explained(config):
            warnings.resetwarnings()
            warnings.filters.extend(filters)  # type: ignore[attr-defined]
            with opened(arguments, config, task.rank) as values:
                test(**values)
    except BaseException as error:
        connection.send(_report(task.rank, error, config))
        sys.stdout.flush()
        sys.stderr.flush()
        # the group is not closed: that would wait for collectives which cannot end
        os.killpg(0, signal.SIGKILL)
    connection.send(Report(task.rank, "passed", time.time()))
    connection.poll(None)  # until all have passed: ranks that still wait for this one should be found waiting, not cut off
    held.close()


def _end_with_pytest() -> None:
    """Kill this rank, with all processes that it has started, when the pytest process ends."""
    pytest_process = multiprocessing.parent_process()
    assert pytest_process is not None
    pytest_process.join()
    os.killpg(0, signal.SIGKILL)


def _redirect_output(task: Task) -> None:
    for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        with task.output(name).open("w") as file:
            os.dup2(file.fileno(), stream.fileno())
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


@functools.lru_cache(maxsize=1)
def minimal_pytest(options: tuple[str, ...]) -> pytest.Config:
    """The pytest configuration that rewrites asserts and shows failures: the user's options, without plugins and conftest files.

    The fork server makes it once for all ranks, see ``preloaded.py``; with other options it is made again here.
    """
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, AssertionRewritingHook)]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTEST_PLUGINS", raising=False)
        patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        config = pytest.Config.fromdictargs({}, list(options))
    config.pluginmanager.register(TerminalReporter(config, io.StringIO()), "terminalreporter")  # pytest 8 needs it to compare
    return config


def _load(task: Task, config: pytest.Config) -> tuple[Callable[..., None], dict[str, Any], list[Any]]:
    """The test, its arguments and the warning filters; the module comes first, because the pickled values may need its classes."""
    owner: Any = importtestmodule(task.module, config)
    arguments, attributes, filters = pickle.loads(task.values)
    *classes, name = task.names
    for each in classes:
        owner = getattr(owner, each)
    if classes:
        owner = owner()
        vars(owner).update(attributes)
    return getattr(owner, name), arguments, filters


def _group_opened(task: Task) -> AbstractContextManager[Any]:
    from parwrap.group import group
    from parwrap.world.world import World

    rendezvous = (task.folder / "rendezvous").as_uri()
    return group.opened(World(task.rank, task.size, task.rank, task.size, launcher="testing", init_method=rendezvous), backend="gloo")


def _comparisons_explained(config: pytest.Config) -> AbstractContextManager[Any]:
    """Make a failing ``assert a == b`` inside the block explain how the two differ, as pytest does around each test."""
    item = types.SimpleNamespace(config=config, ihook=config.hook)
    return contextmanager(assertion.pytest_runtest_protocol)(item)  # type: ignore[arg-type]


def _report(rank: int, error: BaseException, config: pytest.Config) -> Report:
    now = time.time()
    if isinstance(error, pytest.skip.Exception):
        return Report(rank, "skipped", now, str(error))
    if isinstance(error, pytest.xfail.Exception):
        return Report(rank, "xfailed", now, str(error))
    failure = pytest.ExceptionInfo.from_exception(error)
    style = config.getoption("tbstyle")
    if style in ("auto", "line", "no"):
        style = "long" if len(failure.traceback) <= 3 else "short"  # run(), the test and one function that it calls
    text = io.StringIO()
    failure.getrepr(showlocals=config.getoption("showlocals"), style=style, funcargs=True).toterminal(TerminalWriter(text))
    return Report(rank, "failed", now, failure.exconly(tryshort=True).partition("\n")[0], text.getvalue().strip("\n"))
