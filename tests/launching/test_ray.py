"""What ``--launcher ray`` makes of a command line, of a script in a worker and of what workers tell. No Ray takes part: what is called
of it in a worker is replaced here, by what the documentation says of it.
"""

import os
import queue
import signal
import socket
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
import torch

from parwrap.launching.failures import Failure
from parwrap.launching.plan import Script
from parwrap.launching.ray import _follow, _knock, be_a_rank
from parwrap.run import main


@pytest.fixture(autouse=True)
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "train.py").touch()


def launched(*argv: str) -> int:
    return main(["--launcher", "ray", *argv, "train.py", "--lr", "0.1"])


@pytest.mark.parametrize(
    ("options", "ranks", "cluster"),
    [
        ("--cpus-per-worker 1", "1 worker of Ray, each with a CPU core", "started on this machine"),
        ("--num-workers 2 --use-gpu --address auto", "2 workers of Ray, each with a CPU core and a GPU", "auto"),
        ("--num-workers 2 --cpus-per-worker 3 --address local", "2 workers of Ray, each with 3 CPU cores", "started on this machine"),
    ],
)
def test_show(options, ranks, cluster, tmp_path, capsys):
    assert 0 == launched(*options.split(), "--seed", "1", "--dry-run")
    assert (
        f"""\
ranks      {ranks}
script     train.py --lr 0.1
inside     parwrap.distributed(seed=1)
cluster    {cluster}
directory  {tmp_path}
"""
        == capsys.readouterr().out
    )


def test_show_a_cluster_of_the_environment_and_a_copy(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "node1:6379")

    assert 0 == launched("--upload", "--plain", "--dry-run")
    printed = capsys.readouterr().out
    assert "inside     none: only launched\n" in printed
    assert f"cluster    node1:6379\ndirectory  {tmp_path}, copied to the workers\n" in printed


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            "--nproc-per-node 2",
            "--launcher ray runs one rank in each worker: remove --nproc-per-node, and set the number of workers with --num-workers N.",
        ),
        ("--log-dir logs", "--log-dir has no effect in Ray workers: remove it."),
        ("--all-ranks", "--all-ranks has no effect in Ray workers: remove it."),
        ("--tee 3", "--tee has no effect in Ray workers: remove it."),
        ("--start-method spawn", "--start-method has no effect in Ray workers: remove it."),
        (
            "--num-workers 99 --use-gpu",
            f"--use-gpu needs 99 GPUs, but torch can use {torch.cuda.device_count()} on this machine: start fewer workers, or "
            "name a Ray cluster that has them: --address HOST:PORT.",
        ),
    ],
)
def test_what_cannot_be_done(options, text, capsys):
    assert 2 == launched(*options.split())
    assert f"parwrap run: {text}\n" == capsys.readouterr().err


def test_without_ray(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)

    assert 2 == launched()
    printed = capsys.readouterr().err
    assert printed.startswith("parwrap run: --launcher ray needs Ray Train 2.60 or later, which is not installed (")
    assert printed.endswith("): pip install 'ray[train]>=2.60', or install parwrap[ray].\n")


def test_the_address_of_the_dashboard_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")

    assert 2 == launched()
    assert capsys.readouterr().err == (
        "parwrap run: http://127.0.0.1:8265 is the address of Ray's dashboard, which runs no script in this way: pass the cluster's own, "
        "as in --address HOST:6379 or ray://HOST:10001, or run this command with `ray job submit`. By default the address is RAY_ADDRESS.\n"
    )


def test_an_address_of_ipv6_is_knocked_at():
    try:
        listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with listener:
        _knock(f"[::1]:{listener.getsockname()[1]}")


@pytest.fixture
def worker(monkeypatch):
    """This process is the only worker, as far as Ray tells it."""
    context = SimpleNamespace(**{f"get_{name}": lambda: 0 for name in ("world_rank", "local_rank", "node_rank")})
    context.get_world_size = context.get_local_world_size = lambda: 1
    modules = {name: ModuleType(name) for name in ("ray", "ray.util", "ray.train", "ray.train.collective")}
    modules["ray"].util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
    modules["ray.train"].get_context = lambda: context
    modules["ray.train.collective"].broadcast_from_rank_zero = lambda value: value
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


def test_what_a_worker_reports_of_a_script(worker, tmp_path):
    output = queue.Queue()
    (tmp_path / "train.py").write_text("""
import os, sys
print({name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "FORK")}, sys.argv[1:], len(os.environ["PARWRAP_SECRET"]))
raise KeyError("no such key")
""")
    os.environ["FORK"] = "spoon"
    with pytest.raises(RuntimeError, match="KeyError: 'no such key'"):
        be_a_rank(Script("train.py", ("a", "b c")), str(tmp_path), output)
    del os.environ["FORK"]

    printed = list(output.queue)
    assert {} == printed[0]
    expected = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "FORK": "spoon"}
    assert f"{expected} ['a', 'b c'] 32\n" == b"".join(text for name, text in printed[1:-1] if name == "stdout").decode()
    failure = Failure(**printed[-1])
    assert ("raised", 1, 0, 1) == (failure.ending, failure.status, failure.rank, failure.size)
    assert failure.text.endswith('train.py", line 4, in <module>\n    raise KeyError("no such key")\nKeyError: \'no such key\'')
    assert ["train.py"] == os.listdir()


@pytest.mark.slow
def test_what_a_worker_reports_of_a_script_that_is_killed(worker, tmp_path):
    output = queue.Queue()
    (tmp_path / "train.py").write_text("import os; os.kill(os.getpid(), 9)")
    with pytest.raises(RuntimeError, match="was killed by SIGKILL"):
        be_a_rank(Script("train.py", scope=None), str(tmp_path), output)

    assert 128 + signal.SIGKILL == list(output.queue)[-1]["status"]


def test_a_node_without_the_directory(worker, tmp_path):
    output = queue.Queue()
    with pytest.raises(RuntimeError):
        be_a_rank(Script("train.py"), str(tmp_path / "none"), output)

    printed = list(output.queue)[-1]
    assert 2 == printed["status"]
    assert f" has no directory {tmp_path / 'none'}: put it on a file system that all nodes share, or add --upload." in printed["text"]


def failed(rank: int, time: float, **facts) -> dict:
    return {"rank": rank, "size": 2, "attempt": 0, "time": time, "ending": "exited", "status": 3, "exception": "SystemExit: 3", **facts}


def follow(*printed, error: Exception | None = None) -> int:
    """The exit code when workers tell this, and then Ray ends the job."""
    output = queue.Queue()
    for each in printed:
        output.put(each)

    def fit():
        if error:
            raise error

    return _follow(SimpleNamespace(fit=fit), output)


def test_output_goes_where_it_went_on_the_worker(capfd):
    assert 0 == follow({}, ("stdout", b"half a "), ("stderr", b"bar\r"), ("stdout", b"line\xc3\xa4\n"))
    assert ("half a line\u00e4\n", "bar\r") == capfd.readouterr()


def test_the_first_failure_has_the_last_word(capsys):
    first = failed(1, 1.0, ending="raised", status=1, text="Traceback ...\nValueError: this", exception="ValueError: this")

    assert 1 == follow({}, failed(0, 2.0), first, error=RuntimeError("of Ray"))
    assert "rank 0 of 2 later exited with code 3\nrank 1 of 2 failed:\nTraceback ...\nValueError: this\n" == capsys.readouterr().err


def test_a_rank_that_was_killed_comes_before_one_that_lost_it(capsys):
    lost = failed(0, 1.0, ending="raised", status=1, text="Traceback ...", exception="LockstepError: rank 1 has ended")

    assert 137 == follow({}, lost, failed(1, 2.0, ending="killed", status=137, exception=""), error=RuntimeError("of Ray"))
    assert capsys.readouterr().err.splitlines()[-1] == "rank 1 of 2 was killed by SIGKILL (out of memory?)"


def test_an_exit_code_needs_no_word(capsys):
    assert 3 == follow({}, failed(0, 1.0), error=RuntimeError("of Ray"))
    assert "" == capsys.readouterr().err


def test_a_failure_before_ranks_have_started_again_is_told_and_counts_no_more(capsys):
    assert 0 == follow({}, failed(0, 1.0, text="no data"), {}, ("stdout", b"ok"))
    assert "no data\n" == capsys.readouterr().err
    assert 4 == follow({}, failed(0, 1.0), {}, failed(0, 2.0, status=4), error=RuntimeError("of Ray"))


def test_after_ctrl_c_no_call_of_ray_is_under_way(monkeypatch):
    monkeypatch.setattr("parwrap.launching.ray.LOOK", 0.01)
    before, threads = signal.getsignal(signal.SIGINT), threading.active_count()

    def fit():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as Ray does, with a handler of its own
        assert before == signal.getsignal(signal.SIGINT)
        assert threads + 1 == threading.active_count()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _follow(SimpleNamespace(fit=fit), queue.Queue())
    assert threads == threading.active_count()


def test_a_failure_of_ray_itself(capsys):
    assert 1 == follow({}, error=RuntimeError("a worker was lost"))
    assert "parwrap run: Ray ended the job: a worker was lost\n" == capsys.readouterr().err
