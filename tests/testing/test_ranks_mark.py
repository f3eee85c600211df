"""``@pytest.mark.ranks``: tests that run on several ranks, and pytest's reports of those that do not pass."""

import ipaddress
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import parwrap
from inner_pytest import Run, on_two_ranks

pytest_plugins = ["pytester"]


@pytest.mark.ranks(2)
def test_the_process_group_is_open():
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.tolist() == [2, 2, 2]


@pytest.mark.ranks(3)
def test_each_rank_knows_its_place():
    assert parwrap.gather((parwrap.rank(), parwrap.local_rank(), parwrap.world_size())) == [(0, 0, 3), (1, 1, 3), (2, 2, 3)]


@pytest.mark.ranks(1)
def test_one_rank_has_no_process_group():
    assert not dist.is_initialized()
    assert parwrap.reduce_sum(5) == 5


@pytest.mark.ranks(2)
def test_nothing_listens_beyond_this_machine():
    listening = {connection.laddr.ip for connection in psutil.Process().net_connections("inet") if connection.status == psutil.CONN_LISTEN}
    assert listening
    assert all(ipaddress.ip_address(address).is_loopback for address in listening)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("factor", "total"), [(2, 2), (torch.tensor(5), 5)])
def test_parameters_reach_every_rank(factor, total):
    assert parwrap.reduce_sum(factor * parwrap.rank()) == total


@pytest.mark.slow
def test_what_is_named_in_the_configuration_is_imported_once_for_all_ranks(pytester, inner_options):
    pytester.makepyfile(slow="import os\nimported_in = os.getpid()\n")
    pytester.makepyfile(
        test_inner="""
        import os, parwrap, pytest, slow

        @pytest.mark.ranks(2)
        def test_it():
            assert os.getpid() not in parwrap.gather(slow.imported_in)
            assert 1 == len({*parwrap.gather(slow.imported_in)})
        """
    )
    pytester.makeini("[pytest]\npythonpath = .\nranks_preload = slow missing_module\n")

    outcome = pytester.runpytest_subprocess(*inner_options)

    outcome.assert_outcomes(passed=1)


@pytest.mark.ranks(2)
def test_a_fixture_has_the_same_value_on_every_rank(tmp_path):
    (tmp_path / str(parwrap.rank())).touch()
    parwrap.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


class TestOuter:
    class TestInner:
        def setup_method(self):
            self.made_in = os.getpid()

        @pytest.mark.ranks(2)
        def test_methods_have_the_self_that_fixtures_have_set_up(self):
            assert parwrap.gather(self.made_in) == [self.made_in] * 2
            assert self.made_in != os.getpid()


@pytest.fixture
def _launched_by_torchrun(monkeypatch: pytest.MonkeyPatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "MASTER_ADDR": "nowhere", "SEEN": "by all"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("_launched_by_torchrun")
def test_ranks_have_the_environment_less_the_launch_variables():
    assert os.environ["SEEN"] == "by all"
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "PYTEST_DISABLE_PLUGIN_AUTOLOAD"} & set(os.environ)
    assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"])
    assert tempfile.gettempdir() == os.environ["TMPDIR"]


@pytest.mark.ranks(2)
def test_ranks_may_start_processes():
    assert len(list(DataLoader(range(4), num_workers=1))) == 4


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("error:careful")
def test_warning_filters_hold_on_every_rank():
    with pytest.raises(UserWarning, match="careful"):
        warnings.warn("careful", stacklevel=1)


def test_the_default_start_method_is_not_settled_by_the_mark(run: Run, request: pytest.FixtureRequest):
    settled = multiprocessing.get_start_method(allow_none=True)  # maybe by another test, in this process
    request.addfinalizer(lambda: multiprocessing.set_start_method(settled, force=True))
    multiprocessing.set_start_method(None, force=True)

    run(on_two_ranks("multiprocessing.set_start_method('spawn')")).assert_outcomes(passed=1)


@pytest.mark.parametrize("mode", ["prepend", "append", "importlib"])
def test_classes_of_the_test_module_are_the_same_in_the_ranks(run: Run, pytester: pytest.Pytester, mode: str):
    pytester.mkdir("folder")
    pytester.makepyfile(
        **{
            "folder/test_in_folder": """
            import pytest

            class Point:
                pass

            @pytest.mark.ranks(2)
            @pytest.mark.parametrize("point", [Point()])
            def test_it(point):
                assert isinstance(point, Point)
            """
        }
    )
    run("", f"--import-mode={mode}").assert_outcomes(passed=1)


def test_pytest_options_count_in_the_ranks(run: Run):
    result = run(on_two_ranks("value = 3; assert value == 4"), "--assert=plain", "--tb=short", "--showlocals")
    result.stdout.fnmatch_lines(["[[]rank ?] test_inner.py:*: in test_it", "[[]rank ?] E   AssertionError", "[[]rank ?] *value * = 3"])


def test_the_mark_is_registered(run: Run):
    run("", "--markers").stdout.fnmatch_lines(["@pytest.mark.ranks(n, timeout=60, fresh=False): *"])


def test_the_plugin_does_not_import_torch():
    subprocess.run([sys.executable, "-c", "import sys, parwrap.testing.plugin; sys.exit('torch' in sys.modules)"], check=True)


def still_running(pids: list[int]) -> list[int]:
    """Those of the processes ``pids`` that have not ended within 20 s."""
    until = time.monotonic() + 20
    while (running := [pid for pid in pids if _runs(pid)]) and time.monotonic() < until:
        time.sleep(0.05)
    return running


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("how", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL])
def test_no_process_outlives_pytest(pytester: pytest.Pytester, inner_options: list[str], how: signal.Signals):
    body = """
        warnings.simplefilter("ignore")  # Python 3.12 warns of a fork with threads
        os.fork()
        os.write(2, f"{os.getpid()}\\n".encode())
        time.sleep(60)
        """
    pytester.makepyfile("import os, time, warnings, pytest\n" + on_two_ranks(body))
    command = [sys.executable, "-m", "pytest", "-s", *inner_options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as pytest_process:
        assert pytest_process.stderr is not None
        ranks_and_what_they_started = {int(pytest_process.stderr.readline()) for _ in range(4)}
        below = [process.pid for process in psutil.Process(pytest_process.pid).children(recursive=True)]
        assert ranks_and_what_they_started < set(below)
        pytest_process.send_signal(how)
        assert still_running(below) == []


@pytest.mark.parametrize("end", ["assert rank() == 0; time.sleep(60)", pytest.param("time.sleep(60)", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("short_grace")
def test_no_process_outlives_its_test(run: Run, pytester: pytest.Pytester, end: str):
    result = run(
        f"""
        @pytest.mark.ranks(2, timeout=3)
        def test_it():
            started = os.fork()
            if started == 0:
                time.sleep(60)
            with open("pids", "a") as file:
                print(os.getpid(), started, file=file)
            {end}
        """
    )
    result.assert_outcomes(failed=1)
    pids = [int(pid) for pid in (pytester.path / "pids").read_text().split()]
    assert len(pids) == 4
    assert still_running(pids) == []
