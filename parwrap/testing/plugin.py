"""Pytest plugin: ``@pytest.mark.ranks(2)`` runs a test on two processes with a gloo process group open in each.

For example::

    @pytest.mark.ranks(2)
    def test_every_rank_gets_the_mean():
        assert parwrap.reduce_mean(parwrap.rank()) == 0.5

The ranks stay for the next test, so a test takes about as long as on one process. Each test starts with the same random streams, and fails
if it leaves something changed for the next: a patch, an environment variable, a thread, a default of torch. ``ranks(2, fresh=True)`` starts
processes for this test only, which may leave anything and end as they like.

A failure is shown as the traceback of the rank that failed first; after a time limit, ``ranks(2, timeout=60)`` seconds, the Python stack of
every rank is shown. Fixtures and setup functions such as ``setup_module`` run once, in the pytest process. Each rank gets a copy of the
values of fixtures, of what has changed in the test's module and class since they were collected, and of the environment. The copies must
pickle; ranks do not see other changes. Each rank has its own ``capsys``, ``capfd``, ``caplog``, ``monkeypatch``, ``recwarn`` and
``tmp_path_factory``; ``request`` has its ``param`` and names the test.

The ranks import each test's module again, once. To import slow modules only once for all ranks, list them in ``ranks_preload`` in pytest's
configuration::

    [tool.pytest.ini_options]
    ranks_preload = ["pandas", "transformers"]

This file reads the mark and reports to pytest; ``rank_pools.py`` handles the processes.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
import pickle
import re
import sys
import textwrap
import warnings
from contextlib import suppress
from operator import is_
from pathlib import Path
from typing import Any, NoReturn

import pytest
from _pytest.unittest import TestCaseFunction

from parwrap.testing.rank_fixtures import sent
from parwrap.testing.rank_pools import GRACE, Pools, Rank, dump_stacks, rank_environ, start_fork_server
from parwrap.testing.rank_process import RankSetup, Report, Task

POOLS = pytest.StashKey[Pools]()
COLLECTED = pytest.StashKey[dict[Any, dict[str, Any]]]()
"""The attributes of modules and classes with tests on ranks, as they were when collected."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("ranks_preload", "modules to import once for the ranks of all tests, such as modules that are slow to import", "args", [])


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "ranks(n, timeout=60, fresh=False): run the test on n processes with an open gloo process group, for at most timeout seconds; "
        "fresh=True starts processes for this test only.",
    )
    config.stash[POOLS] = Pools(_pytest_options(config), config.getoption("--capture") != "no")


def pytest_unconfigure(config: pytest.Config) -> None:
    if POOLS in config.stash:
        config.stash[POOLS].close()


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> None:
    """Start the fork server before a module that needs it is imported, so that the server and pytest import torch at the same time."""
    if b"mark.ranks" in module_path.read_bytes() and not parent.config.getoption("--collect-only"):
        start_fork_server(parent.config.getini("ranks_preload"), _pytest_options(parent.config))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Note the attributes of modules and classes with tests on ranks, so that :func:`_changed` finds what setup and fixtures change."""
    tests = [item for item in session.items if isinstance(item, pytest.Function) and item.get_closest_marker("ranks")]
    owners = {owner for item in tests for owner in (item.module, item.cls) if owner}
    session.config.stash[COLLECTED] = {owner: _attributes(owner) for owner in owners}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse an invalid mark before fixtures are made."""
    if isinstance(item, pytest.Function):
        _read_mark(item)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    asked = _read_mark(pyfuncitem)
    if asked is None:
        return None
    _run(pyfuncitem, *asked)
    return True


def _read_mark(item: pytest.Function) -> tuple[int, float, bool] | None:
    """The number of ranks, the time limit in seconds and whether they are fresh in the mark of ``item``, if it has one."""
    mark = item.get_closest_marker("ranks")
    if mark is None:
        return None
    size = mark.args[0] if mark.args else None
    options = dict(mark.kwargs)
    timeout, fresh = options.pop("timeout", 60), options.pop("fresh", False)
    if options:
        problem = f"has no option {', '.join(options)}"
    elif not mark.args:
        problem = "does not say how many ranks to run on"
    elif len(mark.args) > 1:
        problem = f"takes one positional argument, not {mark.args}"
    elif type(size) is not int or size < 1:
        problem = f"takes a positive number of ranks, not {size!r}"
    elif type(timeout) not in (int, float) or not timeout > 0:
        problem = f"takes a positive timeout in seconds, not {timeout!r}"
    elif type(fresh) is not bool:
        problem = f"takes True or False for fresh, not {fresh!r}"
    elif inspect.iscoroutinefunction(item.function) or inspect.isasyncgenfunction(item.function):
        problem = "cannot run an async test, because the ranks run no event loop"
    elif isinstance(item, TestCaseFunction):
        problem = "cannot run a method of a unittest.TestCase"
    else:
        return size, timeout, fresh
    pytest.fail(
        f"@pytest.mark.ranks {problem}. Write @pytest.mark.ranks(2) or @pytest.mark.ranks(2, timeout=60) on a plain function or method.",
        pytrace=False,
    )


def _run(item: pytest.Function, size: int, timeout: float, fresh: bool) -> None:
    """Run ``item`` on ``size`` ranks; if a rank does not pass, the test ends like the first such rank."""
    task = _task(item, last=fresh)
    with item.config.stash[POOLS].lent(size, fresh) as pool:
        try:
            reports = pool.run(task, timeout)
            for first in reports:
                if first.outcome != "passed":
                    _end_like(item, first, reports, pool.ranks)
            if len(reports) < size:
                pytest.fail(_where_all_are(pool.ranks, reports, timeout), pytrace=False)
        finally:
            for rank in pool.ranks:
                _attach_output(item, rank.setup)


def _pytest_options(config: pytest.Config) -> tuple[str, ...]:
    """The command line of pytest on the ranks, with which they rewrite asserts and show failures as this process does."""
    options = ["--noconftest", "-c", os.devnull, f"--rootdir={config.rootpath}"]
    options += ["-o", f"consider_namespace_packages={config.getini('consider_namespace_packages')}"]
    options += [f"{name}={config.getoption(name)}" for name in ("--import-mode", "--assert", "--tb", "--verbosity")]
    options += ["--showlocals"] * config.getoption("--showlocals")
    return tuple(options)


def _task(item: pytest.Function, last: bool) -> Task:
    return Task(
        module=item.path,
        names=(*(node.name for node in item.listchain() if isinstance(node, pytest.Class)), item.originalname),
        values=_pickled_values(item),
        environ=rank_environ(),
        directory=os.getcwd(),
        path=tuple(sys.path),
        start_method=multiprocessing.get_start_method(allow_none=True),
        last=last,
    )


def _pickled_values(item: pytest.Function) -> bytes:
    """The test's values for :attr:`Task.values`, pickled."""
    arguments = {name: sent(item.funcargs[name], item) for name in item._fixtureinfo.argnames}
    attributes = dict(vars(item.instance)) if item.cls else {}
    of_module, of_class = _changed(item.module, item), _changed(item.cls, item)
    described = {f"argument {name!r}": value for name, value in arguments.items()}
    described |= {f"attribute 'self.{name}'": value for name, value in attributes.items()}
    described |= {f"changed attribute '{name}' of the class": value for name, value in of_class.items()}
    described |= {f"changed global {name!r}": value for name, value in of_module.items()}
    of_pytest = {f"argument {name!r}" for name in arguments if _is_of_pytest(item, name)}
    for description, value in described.items():
        if why := _why_not_sent(value):
            why += ". Create it inside the test, or let its fixture return what it is created from, such as a path or a number."
            if description in of_pytest:
                why = "it is a fixture of pytest itself, which ranks do not have. Use it in a fixture, or in a test without the mark."
            pytest.fail(f"The {description} of {item.name} cannot be sent to the ranks, which are separate processes: {why}", pytrace=False)
    return pickle.dumps((arguments, of_module, of_class, attributes, list(warnings.filters)))


def _changed(owner: Any, item: pytest.Function) -> dict[str, Any]:
    """The attributes of a module or class that are not as collected, by name: those set, and containers with other items."""
    before = item.config.stash[COLLECTED].get(owner)
    if before is None:
        return {}
    return {name: now[0] for name, now in _attributes(owner).items() if name not in before or not _same(before[name], now)}


def _attributes(owner: Any) -> dict[str, tuple[Any, list[Any]]]:
    """The attributes of a module or class, inherited ones too: each with the items that it has now if it is a container."""
    owners = reversed(owner.__mro__[:-1]) if isinstance(owner, type) else (owner,)
    found = {name: value for each in owners for name, value in vars(each).items() if not name.startswith("__")}
    return {name: (value, _items(value)) for name, value in found.items()}


def _items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    return [*value] if isinstance(value, (list, set)) else []


def _same(one: tuple[Any, list[Any]], other: tuple[Any, list[Any]]) -> bool:
    """Whether two entries are the identical objects: values such as tensors have no plain ``==``."""
    return one[0] is other[0] and len(one[1]) == len(other[1]) and all(map(is_, one[1], other[1]))


def _why_not_sent(value: Any) -> str:
    """Why ``value`` does not pickle; empty if it does."""
    try:
        pickle.dumps(value)
    except Exception as error:
        local = re.search(r"'(\S*<locals>\S*)'", str(error))
        return f"{local[1]} is defined inside a function, where the ranks cannot find it" if local else str(error)
    return ""


def _is_of_pytest(item: pytest.Function, name: str) -> bool:
    """Whether ``name`` is a fixture of ``item`` that pytest itself defines, and no parameter."""
    is_parameter = hasattr(item, "callspec") and name in item.callspec.params
    definitions = item._fixtureinfo.name2fixturedefs.get(name) or ()
    return not is_parameter and any(each.func.__module__.startswith("_pytest.") for each in definitions[-1:])


def _end_like(item: pytest.Function, first: Report, reports: list[Report], ranks: list[Rank]) -> NoReturn:
    """Skip, xfail or fail the test as the rank of ``first`` did; the traceback of a failure comes last."""
    if first.outcome == "skipped":
        raise pytest.skip.Exception(first.headline, _use_item_location=True)
    if first.outcome == "xfailed":
        pytest.xfail(first.headline)
    lines = {rank.setup.rank: f"was still running {GRACE:g} s later and was killed" for rank in ranks}
    lines |= {report.rank: "passed" if report.outcome == "passed" else f"afterwards: {report.headline}" for report in reports}
    del lines[first.rank]
    said = [_said(first.rank, first.headline), *(_said(rank, line) for rank, line in lines.items())]
    if first.text:
        said.append(_said(first.rank, f"\n{first.text}"))
    if any(mark.kwargs.get("raises") for mark in item.iter_markers("xfail")):
        raise _failure_of_kind("\n".join(said), first.kind)
    pytest.fail("\n".join(said), pytrace=False)


def _failure_of_kind(text: str, kind: bytes) -> BaseException:
    """A failure as of ``pytest.fail``, which is also of the class ``kind``: pytest compares it with ``xfail(raises=...)``."""
    with suppress(Exception):  # this process cannot import the class, or it allows no second base
        raised = pickle.loads(kind)
        if not issubclass(raised, (KeyboardInterrupt, pytest.exit.Exception)):  # they would end pytest
            both: Any = type("Failed", (pytest.fail.Exception, raised), {"__init__": lambda self, text: None, "__module__": "builtins"})
            error: BaseException = both(text)
            vars(error).update(msg=text, pytrace=False)
            return error
    return pytest.fail.Exception(text, pytrace=False)


def _where_all_are(ranks: list[Rank], reports: list[Report], timeout: float) -> str:
    passed = {report.rank for report in reports}
    stuck = [rank for rank in ranks if rank.setup.rank not in passed]
    dump_stacks(stuck)
    lines = dict.fromkeys(passed, "passed, and waits for the others") | {
        rank.setup.rank: rank.stacks() or "has not reached the test yet" for rank in stuck
    }
    said = [_said(rank, lines[rank]) for rank in sorted(lines)]
    return "\n".join([f"The ranks did not finish within {timeout:g} s. Where each of them is, most recent call first:", *said])


def _said(rank: int, text: str) -> str:
    return textwrap.indent(text, f"[rank {rank}] ", lambda line: True)


def _attach_output(item: pytest.Item, setup: RankSetup) -> None:
    for stream in ("stdout", "stderr"):
        if setup.output(stream).exists() and (text := setup.output(stream).read_text(errors="replace")):
            item.add_report_section("call", f"{stream} of rank {setup.rank}", text)
