"""The common setup of all tests, whichever shell or CI has started pytest, and fixtures that several files use by name."""

import os
import signal
import sys
import warnings
from collections import Counter
from pathlib import Path
from textwrap import dedent

import pytest

from inner_pytest import HEAD, Run
from warm_python import WarmPython

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: of several processes with a thread for each core, most wait
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each of the many processes that tests start would compile parwrap again
sys.dont_write_bytecode = False
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # each rank would start processes that import torch, for one small kernel
# a shell starts background jobs with SIGINT ignored, which the ranks' fork server and other processes of tests would inherit
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run the tests that are marked slow too")
    parser.addoption("--gpu", action="store_true", help="run the tests that need a GPU, and only these")


@pytest.hookimpl(tryfirst=True)  # before processes start that inherit the environment
def pytest_configure(config):
    if not config.getoption("--gpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # ranks train on CPUs, on a machine with a GPU too
        return
    import torch

    if torch.cuda.device_count() == 0:
        raise pytest.UsageError("--gpu: torch sees no GPU here")


def pytest_collection_modifyitems(config, items):
    import torch

    for item in items:
        for marker in item.iter_markers("needs_torch"):
            if torch.__version__ < marker.args:
                item.add_marker(pytest.mark.skip(reason=f"needs torch {'.'.join(map(str, marker.args))}: {marker.kwargs['why']}"))
    if config.getoption("--gpu"):
        config.hook.pytest_deselected(items=[item for item in items if not item.get_closest_marker("gpu")])
        items[:] = [item for item in items if item.get_closest_marker("gpu")]
    else:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU: add --gpu"))
    if not config.getoption("--full"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: add --full"))


@pytest.fixture(autouse=True, scope="session")
def _temporary_files_are_of_this_pytest(tmp_path_factory):
    """Another may run beside it, with ``-n 2`` does, and tests look at what is left there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.getbasetemp()))
        patch.setattr("tempfile.tempdir", None)
        yield


@pytest.fixture(autouse=True)
def _pytest_is_as_brief_as_by_hand(monkeypatch):
    """On a CI machine pytest shows longer differences, also the one that a test has started."""
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("BUILD_NUMBER", raising=False)


@pytest.fixture(scope="session")
def warm_python():
    """Runs commands of parwrap, see :class:`WarmPython`."""
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    python = WarmPython({**buffered, "PYTHONPATH": str(Path(__file__).parents[1])})
    yield python
    python.close()


@pytest.fixture
def nothing_is_warned_of():
    """A warning fails the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # which torchdata calls
        yield


@pytest.fixture
def short_grace(monkeypatch) -> float:
    """Seconds that an inner pytest gives the other ranks of a test that has failed."""
    for module in ("plugin", "rank_pools"):
        monkeypatch.setattr(f"parwrap.testing.{module}.GRACE", 0.5)
    return 0.5


@pytest.fixture
def inner_options(request: pytest.FixtureRequest) -> list[str]:
    """What an inner pytest needs to know the plugin, and to start at once: it would load hypothesis anew each time."""
    known = [] if request.config.pluginmanager.has_plugin("parwrap") else ["-p", "parwrap.testing.plugin"]
    return [*known, "-p", "no:hypothesispytest"]


@pytest.fixture
def run(pytester: pytest.Pytester, inner_options: list[str]) -> Run:
    """Run the source of a test file in a pytest of its own."""

    def run(source: str, *options: str) -> pytest.RunResult:
        pytester.makepyfile(test_inner=HEAD + dedent(source))
        return pytester.runpytest_inprocess(*inner_options, *options)

    return run


@pytest.fixture
def pages(tmp_path, monkeypatch):
    """The pages of a node with two ranks, both opened by the test's process."""
    from parwrap.checks.positions import Positions

    both = []
    for rank in (0, 1):
        monkeypatch.setattr("parwrap.checks.positions._openings", Counter())  # as in a process of its own
        both.append(Positions(tmp_path, rank, range(2)))
    yield both
    for each in both:
        each.close()
