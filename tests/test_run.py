"""The command itself, on two ranks: real processes, so each run carries several statements."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[1]
WITHIN = 60
"""Seconds, far above what any of these takes."""
UNSET = ("OMP_NUM_THREADS", "PYTHONHASHSEED", "PYTHONUNBUFFERED", "LOGLEVEL")


@pytest.fixture
def environ():
    """Without the variables that a run sets by itself, and with a directory for temporary files that must be empty in the end."""
    temporary = tempfile.mkdtemp()
    ours = {"PYTHONPATH": str(ROOT), "TMPDIR": temporary}
    yield {name: value for name, value in os.environ.items() if name not in UNSET} | ours
    shutil.rmtree(temporary)


@pytest.fixture
def script(tmp_path):
    def write(source: str, name: str = "train.py") -> str:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
        return name

    return write


@pytest.fixture
def started(tmp_path, environ):
    """Start a command in ``tmp_path``; it is ended with the test."""
    processes = []

    def start(*command: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=tmp_path,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def run(started, environ):
    """Run ``parwrap.run`` to its end and see that it leaves nothing behind; gives its exit code, stdout and stderr."""

    def run_to_its_end(*arguments: str) -> tuple[int, str, str]:
        process = started("-m", "parwrap.run", *arguments)
        stdout, stderr = process.communicate(timeout=WITHIN)
        assert_nothing_left(process, environ)
        return process.returncode, stdout, stderr

    return run_to_its_end


def assert_nothing_left(process: subprocess.Popen, environ: dict[str, str]) -> None:
    assert_no_process_left(process)
    # torch's own cache, which its optimizers make, is not ours
    assert [name for name in os.listdir(environ["TMPDIR"]) if not name.startswith("torchinductor_")] == []


def assert_no_process_left(process: subprocess.Popen) -> None:
    until = time.monotonic() + WITHIN
    while left := [other for other in psutil.process_iter() if is_of_session(other, process.pid)]:
        assert time.monotonic() < until, left
        time.sleep(0.01)


def is_of_session(process: psutil.Process, session: int) -> bool:
    try:
        return os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


def test_inside_the_scope_a_script_speaks_once_and_as_under_plain_python(tmp_path, started, run, script):
    script("raise ImportError('taken from where the command runs')", "tarfile.py")  # which torch imports
    path = script("import helper, os, sys\nprint(sys.argv, sys.path[0], __file__, __name__, os.environ.get('RANK'))", "scripts/train.py")
    script("", "scripts/helper.py")
    expected = started(path, "--lr", "0.1").communicate(timeout=WITHIN)[0]

    assert run("--nproc-per-node", "2", path, "--lr", "0.1") == (0, expected, "")


def test_a_module_runs_inside_the_scope(tmp_path, started, run, script):
    script("import sys\nprint(sys.argv, sys.path[0], __name__, __package__)", "recipes/digits.py")
    expected = started("-m", "recipes.digits", "x").communicate(timeout=WITHIN)[0]

    assert run("--nproc-per-node", "2", "--seed", "1", "-m", "recipes.digits", "x") == (0, expected, "")


def test_ranks_that_are_only_launched_are_plain_processes_with_launch_variables(tmp_path, run, script):
    path = script("""
import atexit, json, multiprocessing, os, random, sys, threading, time
import numpy, torch
class Report:
    def __del__(self): self.file.write("collected ")
report = Report()
report.file = open(f"report-{os.environ['RANK']}", "w")
atexit.register(lambda: report.file.write("exit "))
def late():
    time.sleep(0.1)
    report.file.write("thread ")
threading.Thread(target=late).start()
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE OMP_NUM_THREADS PYTHONHASHSEED GLOO_SOCKET_IFNAME".split()
facts = {name: os.environ.get(name) for name in names}
facts |= {"argv": sys.argv, "threads": torch.get_num_threads(), "process": multiprocessing.current_process().name}
facts |= {"set": list({"a", "b", "c", "d", "e"}), "start method": multiprocessing.get_start_method(allow_none=True)}
facts |= {"drawn": [random.random(), numpy.random.rand()]}
json.dump(facts, open(f"facts-{facts['RANK']}", "w"))
def local_rank_option(): return "--local_rank"
""")
    assert run("--nproc-per-node", "2", "--plain", path, "x") == (0, "", "")

    facts = [json.loads((tmp_path / f"facts-{rank}").read_text()) for rank in (0, 1)]
    shared = str(max(1, len(os.sched_getaffinity(0)) // 2))
    for rank, seen in enumerate(facts):
        assert [seen[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")] == [str(rank), str(rank), "2", "2"]
        assert (seen["OMP_NUM_THREADS"], seen["threads"]) == (shared, int(shared))
        assert (seen["PYTHONHASHSEED"], seen["GLOO_SOCKET_IFNAME"]) == ("0", "lo")
        assert (seen["process"], seen["start method"]) == ("MainProcess", None)
        assert seen["argv"] == ["train.py", f"--local_rank={rank}", "x"]
        assert (tmp_path / f"report-{rank}").read_text() == "thread exit collected "
    assert facts[0]["set"] == facts[1]["set"]
    assert not set(facts[0]["drawn"]) & set(facts[1]["drawn"])


def test_two_jobs_at_once_each_find_their_own_ranks_and_listen_on_the_loopback_alone(started, environ, script):
    path = script("""
import psutil, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
if dist.get_rank() == 0:
    launcher = psutil.Process().parent().parent()
    sockets = [socket for process in (launcher, *launcher.children(recursive=True)) for socket in process.net_connections()]
    listening = [socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN]
    print(int(total), len(listening) > 2, set(listening), flush=True)
dist.barrier()
""")
    jobs = [started("-m", "parwrap.run", "--nproc-per-node", "2", "--plain", path) for _ in range(2)]
    for job in jobs:
        assert job.communicate(timeout=WITHIN) == ("2 True {'127.0.0.1'}\n", "")
        assert job.returncode == 0
    for job in jobs:
        assert_nothing_left(job, environ)


def test_the_first_failing_rank_has_the_last_word(tmp_path, run, script):
    path = script("""
import os, torch, torch.distributed as dist
def unhappy():
    raise ValueError("rank one is unhappy")
dist.init_process_group("gloo")
if os.environ["RANK"] == "1":
    unhappy()
dist.barrier()
""")
    status, stdout, stderr = run("--nproc-per-node", "2", "--plain", path)

    assert (status, stdout) == (1, "")
    assert stderr.endswith(
        f"""\
rank 1 of 2 failed:
Traceback (most recent call last):
  File "{tmp_path}/train.py", line 7, in <module>
    unhappy()
  File "{tmp_path}/train.py", line 4, in unhappy
    raise ValueError("rank one is unhappy")
ValueError: rank one is unhappy
"""
    )
    assert re.sub(r"rank 0 of 2 failed later: RuntimeError: .*Connection closed by peer.*\n", "", stderr).startswith("rank 1 of 2 failed:")


def test_a_killed_rank_is_named_before_those_that_miss_it(run, script):
    path = script("""
import os, signal, torch, torch.distributed as dist
dist.init_process_group("gloo")
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
""")
    status, _, stderr = run("--nproc-per-node", "2", "--plain", path)

    assert status == 128 + signal.SIGKILL
    assert stderr.endswith("rank 1 of 2 was killed by SIGKILL (out of memory?)\n")


@pytest.mark.parametrize(
    ("source", "outcome"),
    [
        ("import sys; sys.exit('no data')", (1, "", "no data\n")),
        ("import os; os._exit(3)", (3, "", "")),
        ("import os\nif os.environ['RANK'] == '1': os._exit(0)\nprint('done')", (0, "done\n", "")),
    ],
    ids=["a message", "without a word", "early and well"],
)
def test_a_script_may_end_itself(run, script, source, outcome):
    assert run("--nproc-per-node", "2", "--plain", script(source)) == outcome


TRAINS = """
import sys, torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = model(torch.randn(4, 2)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("ending", "status", "said"),
    [("sys.exit(3)", 3, ""), ("raise ValueError('after training')", 1, "ValueError: after training\n"), ("sys.exit()", 0, "")],
    ids=["an exit code", "an error", "a good exit"],
)
def test_a_script_that_has_trained_ends_as_under_plain_python(run, script, ending, status, said):
    ended, _, stderr = run("--nproc-per-node", "2", script(TRAINS + ending))

    assert status == ended
    assert stderr.endswith(said)
    assert bool(said) == ("Traceback" in stderr)


def test_ranks_are_started_again_after_a_failure_and_have_logs(tmp_path, run, script):
    path = script("""
import os, sys, torch.distributed as dist
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
print("attempt", attempt, flush=True)
dist.init_process_group("gloo")
if attempt == "0" and rank == "1":
    raise ValueError("not yet")
dist.barrier()
""")
    assert run("--nproc-per-node", "2", "--plain", "--max-restarts", "1", "--redirects", "3", "--log-dir", "logs", path) == (0, "", "")

    (logs,) = (tmp_path / "logs").iterdir()
    assert (logs / "attempt_0" / "1" / "stdout.log").read_text() == "attempt 0\n"
    assert (logs / "attempt_0" / "1" / "stderr.log").read_text().endswith("ValueError: not yet\n")
    assert (logs / "attempt_1" / "0" / "stdout.log").read_text() == "attempt 1\n"


@pytest.mark.parametrize(
    ("number", "to_all", "status"),
    [(signal.SIGTERM, False, 143), (signal.SIGTERM, True, 143), (signal.SIGINT, True, 130), (signal.SIGKILL, False, -9)],
    ids=["terminated", "all terminated", "Ctrl-C", "killed"],
)
def test_however_the_launcher_ends_its_ranks_end_too(started, environ, script, number, to_all, status):
    process = started(
        "-m", "parwrap.run", "--nproc-per-node", "2", "--plain", script("import time\nprint('up', flush=True)\ntime.sleep(999)")
    )
    assert [process.stdout.readline(), process.stdout.readline()] == ["up\n", "up\n"]
    (os.killpg if to_all else os.kill)(process.pid, number)
    _, stderr = process.communicate(timeout=WITHIN)

    assert process.returncode == status
    assert_no_process_left(process)
    if number != signal.SIGKILL:
        assert os.listdir(environ["TMPDIR"]) == []
        assert stderr.count("Traceback") == (number == signal.SIGINT)


def test_a_program_that_is_not_python_can_be_launched(run):
    status, stdout, _ = run("--nproc-per-node", "2", "--plain", "--no-python", "printenv", "LOCAL_RANK")

    assert (status, sorted(stdout.split())) == (0, ["0", "1"])


def test_a_command_without_anything_says_what_is_missing(run):
    assert (2, "", "parwrap.run: there is no script to run: name it after the options, then its own arguments.\n") == run()


def test_one_rank_needs_no_other_process(run, script):
    path = script(
        "import os, psutil, torch\nprint(os.getsid(0) == os.getpid(), psutil.Process().children(), torch.distributed.is_initialized())"
    )

    assert run(path) == (0, "True [] False\n", "")


def test_show_starts_nothing(run, script):
    status, stdout, stderr = run("--show", "--nproc-per-node", "2", script("print('ran')"))

    assert (status, stderr) == (0, "")
    assert stdout.startswith("ranks      2 ranks on 1 node\nscript     train.py\n")


def test_what_cannot_be_run_is_refused_with_exit_code_2(run):
    assert run("--nproc-per-node", "2", "no-such.py") == (
        2,
        "",
        "parwrap.run: there is no script no-such.py: its path is taken from the directory that the command runs in.\n",
    )


def test_values_that_torch_refuses_are_refused_likewise(run, script):
    status, _, stderr = run("--nproc-per-node", "2", "--redirects", "9", script(""))

    assert (status, stderr.partition(" does")[0]) == (2, "parwrap.run: 9")


PRECISION = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(64, 4)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(12):
    for inputs, targets in DataLoader(TensorDataset(x, x[:, :1]), batch_size=8, shuffle=True):
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = nn.functional.mse_loss(outputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
print(outputs.dtype, next(model.parameters()).dtype, loss.item() < 0.1)
"""


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        (["--amp"], "torch.bfloat16 torch.float32 True"),
        (["--amp", "fp16"], "torch.float16 torch.float32 True"),
        (["--amp", "O2", "--nproc-per-node", "2"], "torch.float32 torch.float32 True"),
        (["--amp", "fp16", "--nproc-per-node", "2"], "torch.float16 torch.float32 True"),
    ],
)
def test_a_plain_script_trains_in_mixed_precision(run, script, options, printed):
    status, stdout, _ = run(*options, script(PRECISION))

    assert (0, f"{printed}\n") == (status, stdout)


ACCUMULATING = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(60, 4)
model = nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
for epoch in range(5):
    for inputs, targets in DataLoader(TensorDataset(x, x[:, :1]), batch_size=int(sys.argv[1])):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
print(f"loss {nn.functional.mse_loss(model(x), x[:, :1]).item():.6f}")
"""


def test_a_plain_script_accumulates_over_batches(run, script):
    larger = run(script(ACCUMULATING), "24")
    on_one = run("--accumulate", "3", script(ACCUMULATING), "8")
    on_two = run("--accumulate", "3", "--batch", "global", "--nproc-per-node", "2", script(ACCUMULATING), "8")

    assert 0 == larger[0]
    assert larger[:2] == on_one[:2] == on_two[:2]


def test_a_script_that_accumulates_already_is_told_so(run, script):
    decorated = script("import parwrap\nwith parwrap.accumulate(4):\n    print('inside')\n")
    status, stdout, stderr = run("--accumulate", "2", decorated)

    assert (1, "") == (status, stdout)
    assert "parwrap.accumulate(4) cannot be opened inside parwrap.accumulate(2): a batch is in one window only." in stderr
    assert (0, "inside\n") == run("--accumulate", "4", decorated)[:2]
