"""Replaces pytest's own fixtures in a test with the mark ``ranks``: each rank makes its own from a placeholder.

Every pytest run of every user loads this file, so it does not import torch.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest
from _pytest.capture import CaptureFixture, CaptureManager
from _pytest.logging import LogCaptureHandler, caplog_handler_key, caplog_records_key, catching_logs
from _pytest.recwarn import WarningsRecorder

__all__ = ["opened", "sent"]


class _StandIn:
    """A placeholder, which is sent to the ranks instead of a fixture.

    Args:
        make: a function that makes a rank's fixture from pytest's configuration, the rank and ``known``.
        known: the facts about the fixture in the pytest process.
    """

    def __init__(self, make: Callable[..., AbstractContextManager[Any]], *known: Any) -> None:
        self.make, self.known = make, known


@contextmanager
def _captured(config: pytest.Config, rank: int, capture_class: type) -> Iterator[CaptureFixture[Any]]:
    """Make ``capsys``, ``capfd`` or one of their variants that capture bytes."""
    if not config.pluginmanager.hasplugin("capturemanager"):
        config.pluginmanager.register(CaptureManager("no"), "capturemanager")  # disabled() needs it
    manager: Any = config.pluginmanager.getplugin("capturemanager")
    fixture = CaptureFixture(capture_class, types.SimpleNamespace(config=config), _ispytest=True)  # type: ignore[arg-type]
    manager.set_fixture(fixture)
    fixture._start()
    try:
        yield fixture
    finally:
        fixture.close()  # unread output goes to the output of the rank
        manager.unset_fixture()


@contextmanager
def _logged(config: pytest.Config, rank: int, level: int) -> Iterator[pytest.LogCaptureFixture]:
    """Make ``caplog``, with the ``level`` of the root logger in the pytest process."""
    with catching_logs(LogCaptureHandler(), level=level or None) as handler:
        records: dict[str, list[Any]] = {"call": handler.records}
        item = types.SimpleNamespace(stash={caplog_handler_key: handler, caplog_records_key: records})
        fixture = pytest.LogCaptureFixture(item, _ispytest=True)  # type: ignore[arg-type]
        yield fixture
        fixture._finalize()


def _warned(config: pytest.Config, rank: int) -> AbstractContextManager[WarningsRecorder]:
    """Make ``recwarn``."""
    return WarningsRecorder(_ispytest=True)


def _patching(config: pytest.Config, rank: int) -> AbstractContextManager[pytest.MonkeyPatch]:
    """Make ``monkeypatch``."""
    return pytest.MonkeyPatch.context()


@contextmanager
def _folders(config: pytest.Config, rank: int, base: Path) -> Iterator[pytest.TempPathFactory]:
    """Make ``tmp_path_factory``: each rank makes folders below a separate one."""
    (own := base / f"rank{rank}").mkdir(exist_ok=True)
    yield pytest.TempPathFactory(None, 0, "all", lambda *args: None, own, _ispytest=True)


@contextmanager
def _asked(config: pytest.Config, rank: int, known: Mapping[str, Any], node: Mapping[str, Any]) -> Iterator[Any]:
    """Make ``request``, with the attributes that can be sent."""
    yield _Known("request", {**known, "node": _Known("request.node", node)})


class _Known:
    """The attributes of a pytest object that are available on the ranks."""

    def __init__(self, name: str, known: Mapping[str, Any]) -> None:
        self._name = name
        vars(self).update(known)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        known = ", ".join(f"{self._name}.{each}" for each in sorted(vars(self)) if not each.startswith("_"))
        raise AttributeError(
            f"{self._name}.{name} does not exist in a test marked with ranks: fixtures run in the pytest process, but the ranks are "
            f"separate processes. They have {known}. Request a fixture as an argument of the test, or use request in a fixture."
        )


def sent(value: Any, item: pytest.Function) -> Any:
    """The object to send to the ranks for ``value``, an argument of the test ``item``."""
    stand_in = _STAND_INS.get(type(value))
    return value if stand_in is None else stand_in(value, item)


@contextmanager
def opened(arguments: Mapping[str, Any], config: pytest.Config, rank: int) -> Iterator[dict[str, Any]]:
    """Yield the arguments of a test on a rank, with this rank's fixtures instead of their placeholders."""
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(value.make(config, rank, *value.known)) if isinstance(value, _StandIn) else value
            for name, value in arguments.items()
        }


def _of_request(request: Any, item: pytest.Function) -> _StandIn:
    known = {"fixturenames": list(request.fixturenames), "path": item.path, "scope": request.scope, "keywords": list(item.keywords)}
    if hasattr(request, "param"):
        known["param"] = request.param
    return _StandIn(_asked, known, {"name": item.name, "nodeid": item.nodeid, "originalname": item.originalname, "path": item.path})


_STAND_INS: dict[Any, Callable[[Any, pytest.Function], Any]] = {
    CaptureFixture: lambda value, item: _StandIn(_captured, value.captureclass),
    pytest.LogCaptureFixture: lambda value, item: _StandIn(_logged, logging.root.level),
    WarningsRecorder: lambda value, item: _StandIn(_warned),
    pytest.MonkeyPatch: lambda value, item: _StandIn(_patching),
    pytest.TempPathFactory: lambda value, item: _StandIn(_folders, value.getbasetemp()),
    **dict.fromkeys((pytest.FixtureRequest, *pytest.FixtureRequest.__subclasses__()), _of_request),
}
