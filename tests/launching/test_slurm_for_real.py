"""``--launcher slurm`` on a real SLURM of two nodes, which are both on this machine; skipped where it cannot be started."""

import ast
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from launched import ended_with_the_test
from of_one_process import TRAINING, assert_trained_as_one_process
from slurm_cluster import NotHere, slurm

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
WITHIN = 120
"""Seconds, far above what any of these takes."""


@pytest.fixture(scope="module")
def cluster():
    context = slurm()
    try:
        variables = context.__enter__()
    except NotHere as reason:
        pytest.skip(f"no SLURM of our own: {reason}")
    yield variables
    context.__exit__(None, None, None)


@pytest.fixture
def start(cluster, tmp_path):
    """Start a command in a directory with a space in its name; it is ended with the test."""
    directory = tmp_path / "my work"
    directory.mkdir()

    def started(*command: str) -> subprocess.Popen:
        environ = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
        environ["SBATCH_JOB_NAME"] = "of the environment"  # by itself that goes before what a batch script says
        environ |= {**cluster, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        return start(*command, cwd=directory, env=environ)

    started.directory = directory
    with ended_with_the_test() as start:
        yield started


@pytest.fixture
def run(start):
    """Run a command to its end; gives its exit code, stdout and stderr."""

    def run_to_its_end(*command: str) -> tuple[int, str, str]:
        process = start(*command)
        stdout, stderr = process.communicate(timeout=WITHIN)
        return process.returncode, stdout, stderr

    return run_to_its_end


def ended(run, number: str) -> str:
    """What SLURM tells of a job once all of it has ended."""
    while run("squeue", "--noheader", "--jobs", number)[1]:
        time.sleep(0.1)
    return run("scontrol", "show", "job", number)[1]


def launcher(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "parwrap.run", "--launcher", "slurm", *arguments]


def messages_in(stderr: str) -> list[str]:
    """The launcher's messages, with N for the job's number."""
    return [re.sub(r"job \d+", "job N", line) for line in stderr.splitlines()]


FACTS = """
import json, os, signal, subprocess, sys, threading, parwrap
signalled = threading.Event()
signal.signal(signal.SIGUSR1, lambda *_: signalled.set())
parwrap.barrier()
if parwrap.rank() == 0:
    subprocess.run(["scancel", "--signal=USR1", os.environ["SLURM_JOB_ID"]], check=True)  # as --sbatch signal=USR1@60 does in time
assert signalled.wait(30)
if parwrap.rank() == 0:
    facts = {"argv": sys.argv[1:], "cwd": os.getcwd(), "python": sys.executable, "interface": os.environ.get("GLOO_SOCKET_IFNAME")}
    facts["secret"] = len(os.environ.get("PARWRAP_SECRET", ""))
    json.dump(facts, open("facts", "w"))
print(parwrap.world_size(), "ranks have trained")
sys.exit(5 if parwrap.rank() == 3 else 0)
"""


def test_two_nodes_train_as_one_process_and_a_failure_on_one_is_the_exit_code(start, run, monkeypatch):
    (start.directory / "train.py").write_text(TRAINING + FACTS)
    arguments = ["--partition", "two words", "it's", "$HOME"]

    options = ("--sbatch", "export=PATH,PYTHONPATH,OMP_NUM_THREADS", "--batch", "global")
    status, stdout, stderr = run(*launcher("--nodes", "2", "--nproc-per-node", "2", *options, "train.py", *arguments))
    assert 5 == status, stdout + stderr
    assert "4 ranks have trained\n" in stdout
    log = next(start.directory.glob("slurm-*.out"))
    assert [
        "parwrap run: submitted job N; Ctrl-C cancels it",
        f"parwrap run: job N is running; its log is {log.name}",
        "parwrap run: job N ended: FAILED, exit code 5",
    ] == [line for line in messages_in(stderr) if "queue" not in line]
    assert log.read_text() == stdout
    facts = json.loads((start.directory / "facts").read_text())
    assert {"argv": arguments, "cwd": str(start.directory), "python": sys.executable, "interface": None, "secret": 32} == facts
    assert_trained_as_one_process(start.directory, monkeypatch)


def test_with_restarts_a_rank_that_fails_starts_all_nodes_again(start, run):
    (start.directory / "train.py").write_text("""
import pathlib, sys, parwrap
attempt = len(list(pathlib.Path().glob("attempt-*-0")))
parwrap.barrier()
pathlib.Path(f"attempt-{attempt}-{parwrap.rank()}").touch() if parwrap.rank() == 0 else None
parwrap.barrier()
print("attempt", attempt)
if parwrap.rank() == 1 and attempt == 0:
    sys.exit(3)
parwrap.barrier()
""")
    status, stdout, stderr = run(*launcher("--nodes", "2", "--nproc-per-node", "1", "--max-restarts", "1", "train.py"))

    assert 0 == status, stdout + stderr
    assert ["attempt 0", "attempt 1"] == [line for line in stdout.splitlines() if line.startswith("attempt")]


WAITING = """
import os, signal, sys, time
def save(*_):
    open("saved", "w").close()
    sys.exit()
signal.signal(signal.SIGTERM, save)
print("try", os.environ.get("SLURM_RESTART_COUNT", 0), flush=True)
if "SLURM_RESTART_COUNT" not in os.environ:
    time.sleep(600)
"""


SILENT = """#!/bin/bash
[ ! -e "$0.silent" ] || {{ rm "$0.silent"; echo "Unable to contact slurm controller" >&2; exit 1; }}
exec {scontrol} "$@"
"""


@pytest.fixture
def waiting(start, tmp_path):
    """A job that waits when it runs for the first time, and its number; there is a log of an earlier one."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(SILENT.format(scontrol=shutil.which("scontrol")))
    scontrol.chmod(0o755)
    (start.directory / "wait.py").write_text(WAITING)
    (start.directory / "log").write_text("of an earlier job\n")
    os.utime(start.directory / "log", (1e9, 1e9))
    process = start(*launcher("--plain", "--output", "log", "wait.py"))
    assert "try 0\n" == process.stdout.readline(), process.communicate()
    return process, re.search(r"job (\d+)", process.stderr.readline())[1]


def test_ctrl_c_cancels_the_job_and_a_script_can_save_before_it_ends(waiting, start, run):
    process, number = waiting
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=WITHIN)

    assert 130 == process.returncode
    assert "parwrap run: cancelled job N" == messages_in(stderr)[-1]
    shown = ended(run, number)
    assert "JobState=CANCELLED" in shown
    assert f"JobId={number} JobName=wait\n" in shown
    assert (start.directory / "saved").exists()


def test_a_job_that_is_queued_again_is_followed_on_also_when_slurm_is_silent_for_a_while(waiting, start, run, tmp_path):
    process, number = waiting
    (tmp_path / "scontrol.silent").touch()
    while (tmp_path / "scontrol.silent").exists():
        time.sleep(0.1)
    assert "Requeue=1" in run("scontrol", "show", "job", number)[1]
    assert 0 == run("scontrol", "requeue", number)[0]
    while "JobState=PENDING" not in run("scontrol", "show", "job", number)[1]:
        time.sleep(0.1)
    assert 0 == run("scontrol", "update", f"JobId={number}", "StartTime=now+2")[0]  # else in two minutes
    stdout, stderr = process.communicate(timeout=WITHIN)

    assert 0 == process.returncode, stdout + stderr
    assert "try 1\n" in stdout
    assert "of an earlier job" not in stdout
    assert "parwrap run: job N is running again; its log is log" in messages_in(stderr)


def test_what_slurm_refuses_is_said(start, run):
    (start.directory / "train.py").touch()
    status, _, stderr = run(*launcher("--partition", "nowhere", "train.py"))

    assert 2 == status
    assert "parwrap run: SLURM rejected the job; sbatch printed:\nsbatch: error: invalid partition specified: nowhere\n" in stderr


DECORATED = """
import os, torch, parwrap

@parwrap.distributed(batch="global", seed=1)
def train():
    data = torch.utils.data.TensorDataset(torch.randn(24, 3), torch.randn(24, 1))
    model = torch.nn.Linear(3, 1)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in torch.utils.data.DataLoader(data, batch_size=8, shuffle=True):
        sgd.zero_grad()
        (model(x) - y).square().mean().backward()
        sgd.step()
    return {"rank": parwrap.rank(), "local": parwrap.local_rank(), "size": parwrap.world_size(), "weights": model.weight.tolist()}

facts = train()
print(facts, [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if name in os.environ])
"""


def ranks_of(stdout: str) -> list[dict]:
    """What the script has printed, by rank."""
    lines = re.findall(r"^(\{.*\}) \[\]$", stdout, re.MULTILINE)
    return sorted(map(ast.literal_eval, lines), key=lambda facts: facts["rank"])


def test_a_batch_script_of_ones_own_starts_parwrap_run_on_each_node(start, run, monkeypatch):
    (start.directory / "train.py").write_text(TRAINING + "import parwrap; print(parwrap.world_size(), 'ranks have trained')")
    (start.directory / "job.sh").write_text(f"""#!/bin/bash
srun --ntasks-per-node=1 {sys.executable} -m parwrap.run --nproc-per-node 2 --batch global train.py
""")
    number = run("sbatch", "--parsable", "--nodes=2", "--output=log", "job.sh")[1].strip()
    shown = ended(run, number)  # sbatch --wait looks after 2, 4, 8, 16 seconds

    log = (start.directory / "log").read_text()
    assert "JobState=COMPLETED" in shown, log
    assert "4 ranks have trained\n" in log
    assert_trained_as_one_process(start.directory, monkeypatch)


def test_srun_starts_the_ranks_of_a_decorated_script(start, run):
    (start.directory / "train.py").write_text(DECORATED)
    alone = runpy.run_path(str(start.directory / "train.py"))["facts"]
    status, stdout, stderr = run("srun", "--nodes=2", "--ntasks-per-node=2", sys.executable, "train.py")

    assert 0 == status, stdout + stderr
    ranks = ranks_of(stdout)
    assert [(0, 0), (1, 1), (2, 0), (3, 1)] == [(facts["rank"], facts["local"]) for facts in ranks], stdout + stderr
    for facts in ranks:
        assert 4 == facts["size"]
        torch.testing.assert_close(facts["weights"], alone["weights"])


def test_the_doctor_examines_all_ranks_of_srun(run):
    status, stdout, stderr = run("srun", "--nodes=2", "--ntasks-per-node=2", sys.executable, "-m", "parwrap.doctor", "--json")
    examined = json.loads(stdout)

    assert int(any(finding["serious"] for finding in examined["findings"])) == status, stderr
    assert [0, 1, 2, 3] == [facts["launch"]["rank"] for facts in examined["ranks"]]
    assert ("launched", None, 5, 3) == (
        *(examined["self_test"][name] for name in ("by", "failure")),
        *(len(examined["self_test"][name]) for name in ("rows", "clocks")),
    )
