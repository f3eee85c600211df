"""``--launcher ray`` with Ray itself, started for the tests on this machine; skipped where it is not installed."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import psutil
import pytest

from launched import ended_with_the_test
from of_one_process import TRAINING, assert_trained_as_one_process

pytest.importorskip("ray.train", reason="Ray is not installed: pip install 'ray[train]>=2.60'")

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
WITHIN = 180
"""Seconds that any of these takes."""


@pytest.fixture(scope="module")
def variables():
    """An environment in which all that Ray leaves goes with the test; the path is short, for there are sockets in it."""
    ours = {
        "RAY_TMPDIR": tempfile.mkdtemp(dir="/tmp"),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": uuid.uuid4().hex,
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    yield {**os.environ, **ours, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    shutil.rmtree(ours["RAY_TMPDIR"])


@pytest.fixture(scope="module")
def cluster(variables):
    """The address of a cluster of two nodes, each with a core and, by its word, a GPU, which know nothing of where parwrap is."""
    environ = {name: value for name, value in variables.items() if name not in ("PYTHONPATH", "PWD")}
    environ["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "0"
    port = str(20000 + os.getpid() % 10000)
    address = f"127.0.0.1:{port}"
    head = ["--head", "--port", port, "--include-dashboard", "false", "--temp-dir", environ["RAY_TMPDIR"]]
    nodes = []
    try:
        for host, options in (("127.0.0.1", head), ("127.0.0.2", ["--address", address])):
            command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--node-ip-address", host]
            command += ["--num-cpus", "1", "--num-gpus", "1", *options]
            nodes.append(subprocess.Popen(command, env=environ, cwd="/", stdout=subprocess.PIPE, text=True))
            while "Ray runtime started" not in (line := nodes[-1].stdout.readline()):
                assert line, "Ray has not started"
        yield address
    finally:
        started = [child for node in nodes for child in psutil.Process(node.pid).children(recursive=True)]
        for node in reversed(nodes):
            node.terminate()
            node.communicate(timeout=WITHIN)
    assert [] == psutil.wait_procs(started, timeout=30)[1]


@pytest.fixture
def start(variables, tmp_path):
    """Start a command in a directory with a space in its name, with a script ``train.py`` there; it is ended with the test."""
    directory = tmp_path / "my work"
    directory.mkdir()

    def started(script: str, *command: str) -> subprocess.Popen:
        (directory / "train.py").write_text(script)
        return start(sys.executable, *command, cwd=directory, env=variables)

    started.directory = directory
    with ended_with_the_test() as start:
        yield started


LAUNCHER = ("-m", "parwrap.run", "--launcher", "ray", "--num-workers", "2")

FACTS = """
import json, os, signal, sys
import of_the_script, parwrap
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
facts = {"argv": sys.argv, "cwd": os.getcwd(), "python": sys.executable, "threads": torch.get_num_threads()}
json.dump(facts, open("facts", "w"))
print(parwrap.world_size(), "ranks have trained")
sys.exit(5 if parwrap.rank() == 1 else 0)
"""


def test_on_this_machine_ranks_train_as_one_process_and_an_exit_code_of_one_is_the_commands(start, monkeypatch):
    (start.directory / "of_the_script.py").touch()
    arguments = ["train.py", "two words", "$HOME"]

    process = start(TRAINING + FACTS, *LAUNCHER, "--batch", "global", *arguments)
    stdout, stderr = process.communicate(timeout=WITHIN)
    assert 5 == process.returncode, stdout + stderr
    assert "2 ranks have trained\n" == stdout
    assert "rank 1 of 2 exited with code 5" == stderr.splitlines()[-1]
    facts = json.loads((start.directory / "facts").read_text())
    assert {"argv": arguments, "cwd": str(start.directory), "python": sys.executable, "threads": 1} == facts
    assert_trained_as_one_process(start.directory, monkeypatch)


FAILING = """
import os, pathlib, parwrap, of_the_script
first = parwrap.broadcast(not os.path.exists(of_the_script.MARK))
pathlib.Path(of_the_script.MARK).touch()
print("first" if first else "again", flush=True)
parwrap.barrier()
if parwrap.rank() == 1:
    os.kill(os.getpid(), 9) if first else [].pop()
while True:
    parwrap.barrier()
"""


def test_on_a_cluster_ranks_run_in_a_copy_and_start_again_and_a_traceback_is_last(start, cluster, tmp_path):
    (start.directory / "of_the_script.py").write_text(f"MARK = {str(tmp_path / 'mark')!r}")
    process = start(FAILING, *LAUNCHER, "--address", cluster, "--upload", "--max-restarts", "1", "train.py")
    stdout, stderr = process.communicate(timeout=WITHIN)

    assert 1 == process.returncode, stdout + stderr
    assert "first\nagain\n" == stdout
    assert f"rank 1 of 2 on node 1 ({socket.gethostname()}) was killed by SIGKILL (out of memory?)\n" in stderr
    place = 'train.py", line 8, in <module>\n    os.kill(os.getpid(), 9) if first else [].pop()'
    assert place in stderr
    assert str(start.directory) not in stderr.partition(place)[0].splitlines()[-1]
    assert "IndexError: pop from empty list" == stderr.splitlines()[-1]


WAITING = """
import os, time
print(os.getpid(), os.environ["CUDA_VISIBLE_DEVICES"], os.environ["NODE_RANK"], flush=True)
time.sleep(600)
"""


def test_each_rank_has_a_gpu_and_ctrl_c_stops_the_job(start, cluster):
    process = start(WAITING, *LAUNCHER, "--address", cluster, "--use-gpu", "--plain", "train.py")
    ranks, gpus, nodes = zip(*(map(int, process.stdout.readline().split()) for _ in range(2)), strict=True)
    assert ((0, 0), {0, 1}) == (gpus, {*nodes})
    process.send_signal(signal.SIGINT)
    stderr = process.communicate(timeout=WITHIN)[1]

    assert 130 == process.returncode
    assert "parwrap run: stopping the job\n" == stderr
    until = time.monotonic() + 30
    while any(psutil.pid_exists(rank) for rank in ranks):
        assert time.monotonic() < until
        time.sleep(0.1)


def test_what_the_cluster_does_not_have_is_said(start, cluster):
    process = start("", *LAUNCHER, "--address", cluster, "--cpus-per-worker", "3", "train.py")

    assert (
        "parwrap run: the job needs 6 CPUs, but the cluster has 2: the job waits until the cluster has more\n" == process.stderr.readline()
    )
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=WITHIN)
    assert 130 == process.returncode


def test_where_no_cluster_is(start):
    process = start("", *LAUNCHER, "--address", "127.0.0.1:1", "train.py")
    stderr = process.communicate(timeout=WITHIN)[1]

    assert 2 == process.returncode
    assert "parwrap run: no Ray cluster answers at 127.0.0.1:1: " in stderr
