"""One rank of tests with the mark ``ranks``: the code in the rank's own process.

It opens a gloo process group, then runs one test after another and sends a :class:`Report` of each. ``rank_pools.py`` starts, watches and
ends the ranks. Every pytest run of every user loads this file, so it imports torch late.
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
import unittest
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, cast

import pytest
from _pytest import assertion
from _pytest._io import TerminalWriter
from _pytest.assertion.rewrite import AssertionRewritingHook
from _pytest.python import importtestmodule
from _pytest.terminal import TerminalReporter

from parwrap.ranks.platform import kill_group, lead_group, run_after_fork
from parwrap.testing.rank_fixtures import opened

__all__ = ["RankSetup", "Report", "Task", "minimal_pytest", "run"]


@dataclass(frozen=True)
class RankSetup:
    """What the process of a rank is started with.

    Attributes:
        rank: this rank, from 0.
        size: the number of ranks.
        folder: the folder for the rendezvous, output and stacks; one for each pool.
        pytest_options: the command line with which asserts are rewritten and failures are shown as in the parent.
        environ: the environment variables with which the process group is opened.
        capture: whether output goes to :meth:`output` rather than to the terminal.
    """

    rank: int
    size: int
    folder: Path
    pytest_options: tuple[str, ...]
    environ: dict[str, str]
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
        if sys.platform != "win32":
            faulthandler.register(signal.SIGQUIT, file)


@dataclass(frozen=True)
class Task:
    """A test for all ranks of a pool.

    Attributes:
        module: the file of the test.
        names: the attributes that lead from the module to the test: its classes, if any, and itself.
        values: what the test gets, pickled: its arguments, the changed attributes of its module and of its class, the attributes of its
            ``self``, each by name, and the warning filters.
        environ: the environment variables.
        directory: the working directory.
        path: the entries of ``sys.path``.
        start_method: multiprocessing's default, ``None`` until it is fixed.
        last: whether the pool ends after this test, so that it may leave what it likes.
    """

    module: Path
    names: tuple[str, ...]
    values: bytes
    environ: dict[str, str]
    directory: str
    path: tuple[str, ...]
    start_method: str | None
    last: bool


@dataclass(frozen=True)
class Report:
    """How a rank's test ended.

    Attributes:
        rank: the rank.
        outcome: ``"died"`` stands for a process that sent no report.
        time: when the test ended, in seconds since the epoch.
        headline: the exception, the reason of a skip or how the process died, in one line.
        text: the traceback, as pytest shows it; for a process that died, its Python stacks.
        kind: the class of the exception, or the nearest base class that can be pickled; pickled.
    """

    rank: int
    outcome: Literal["passed", "skipped", "xfailed", "failed", "died"]
    time: float
    headline: str = ""
    text: str = ""
    kind: bytes = b""


def run(setup: RankSetup, connection: Connection) -> None:
    """Run the tests that come through ``connection``, and send a :class:`Report` of each. End the process if one does not pass."""
    gc.freeze()  # the collector skips what the fork server has loaded, so its memory is not copied
    lead_group()  # processes that the tests start are killed with it
    threading.Thread(target=_end_with_pytest, daemon=True).start()
    if setup.capture:
        _redirect_output(setup)
    setup.dump_stacks(setup.stacks)
    run_after_fork(lambda: setup.dump_stacks(setup.stacks_of(os.getpid())))
    config = minimal_pytest(setup.pytest_options)
    _set_environ({**setup.environ, "TMPDIR": str(setup.folder)})  # what the group leaves there is removed with the folder
    before = dict(os.environ)
    with _group_opened(setup):
        of_group = {name: value for name, value in os.environ.items() if before.get(name) != value}
        while (task := _received(connection)) is not None:
            _prepare(setup, task, of_group)
            report = _tested(setup, task, config)
            sys.stdout.flush()
            sys.stderr.flush()
            connection.send(report)
            if report.outcome != "passed":
                # the group is not closed: that would wait for collectives which cannot end
                kill_group(os.getpid())


def _received(connection: Connection) -> Task | None:
    try:
        return cast(Task, connection.recv())
    except EOFError:  # the pool is closed
        return None


def _prepare(setup: RankSetup, task: Task, of_group: Mapping[str, str]) -> None:
    """Give this process the environment, working directory and ``sys.path`` of pytest's; ``of_group`` has the process group's variables."""
    if setup.capture:
        for descriptor in (1, 2):
            os.ftruncate(descriptor, 0)
    multiprocessing.set_start_method(task.start_method, force=True)
    _set_environ({**task.environ, **of_group})
    os.chdir(task.directory)
    sys.path[:] = task.path


def _set_environ(environ: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environ)
    tempfile.tempdir = None  # it may name a folder of another environment


def _tested(setup: RankSetup, task: Task, config: pytest.Config) -> Report:
    """Run the test of ``task``; it fails too if it leaves something changed for the next."""
    __tracebackhide__ = True
    try:
        with warnings.catch_warnings(), _comparisons_explained(config), pytest.MonkeyPatch.context() as patch:
            test, arguments, filters = _load(task, config, patch)
            from parwrap.testing.process_state import State, differences, seed

            warnings.resetwarnings()
            warnings.filters.extend(filters)  # type: ignore[attr-defined]
            seed()
            before = None if task.last else State(test.__module__)
            with opened(arguments, config, setup.rank) as values:
                test(**values)
            del test, arguments, values  # what they hold may run threads
            gc.collect()
            found = differences(before) if before else []
    except BaseException as error:
        return _report(setup.rank, error, config)
    if found:
        text = (
            f"The test passed, but leaves changed: {', '.join(found)}. The next test runs in the same processes. Undo the change in the "
            "test, or run the test in processes of its own with @pytest.mark.ranks(n, fresh=True)."
        )
        return Report(setup.rank, "failed", time.time(), text)
    return Report(setup.rank, "passed", time.time())


def _end_with_pytest() -> None:
    """Kill this rank, with all processes that it has started, when the pytest process ends."""
    pytest_process = multiprocessing.parent_process()
    assert pytest_process is not None
    pytest_process.join()
    kill_group(os.getpid())


def _redirect_output(setup: RankSetup) -> None:
    for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        with setup.output(name).open("a") as file:
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


def _load(task: Task, config: pytest.Config, patch: pytest.MonkeyPatch) -> tuple[Callable[..., None], dict[str, Any], list[Any]]:
    """The test, its arguments and the warning filters; ``patch`` gives its module and class what has changed there in pytest's process.

    The module comes first, because the pickled values may need its classes.
    """
    owner: Any = importtestmodule(task.module, config)
    arguments, of_module, of_class, attributes, filters = pickle.loads(task.values)
    *classes, name = task.names
    for changed, value in of_module.items():
        patch.setattr(owner, changed, value, raising=False)
    for each in classes:
        owner = getattr(owner, each)
    if classes:
        for changed, value in of_class.items():
            patch.setattr(owner, changed, value, raising=False)
        owner = owner()
        vars(owner).update(attributes)
    return getattr(owner, name), arguments, filters


def _group_opened(setup: RankSetup) -> AbstractContextManager[Any]:
    from parwrap.ranks import group
    from parwrap.ranks.world import World

    rendezvous = (setup.folder / "rendezvous").as_uri()
    world = World(setup.rank, setup.size, setup.rank, setup.size, launcher="testing", init_method=rendezvous)
    return group.opened(world, backend="gloo")


def _comparisons_explained(config: pytest.Config) -> AbstractContextManager[Any]:
    """Make a failing ``assert a == b`` inside the block explain how the two differ, as pytest does around each test."""
    item = types.SimpleNamespace(config=config, ihook=config.hook)
    return contextmanager(assertion.pytest_runtest_protocol)(item)  # type: ignore[arg-type]


def _report(rank: int, error: BaseException, config: pytest.Config) -> Report:
    now = time.time()
    if isinstance(error, (pytest.skip.Exception, unittest.SkipTest)):
        return Report(rank, "skipped", now, str(error))
    if isinstance(error, pytest.xfail.Exception):
        return Report(rank, "xfailed", now, str(error))
    failure = pytest.ExceptionInfo.from_exception(error)
    style = config.getoption("tbstyle")
    if style in ("auto", "line", "no"):
        style = "long" if len(failure.traceback) <= 3 else "short"  # run(), the test and one function that it calls
    text = io.StringIO()
    failure.getrepr(showlocals=config.getoption("showlocals"), style=style, funcargs=True).toterminal(TerminalWriter(text))
    headline = failure.exconly(tryshort=True).partition("\n")[0]
    return Report(rank, "failed", now, headline, text.getvalue().strip("\n"), _pickled_class(error))


def _pickled_class(error: BaseException) -> bytes:
    for each in type(error).__mro__:
        with suppress(Exception):  # a class in a function
            return pickle.dumps(each)
    return b""
