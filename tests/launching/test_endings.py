"""How a run ends: by a rank's failure, by the script's word, or by a signal, and what is told of it."""

import os
import re
import signal
import time

import pytest

from command_line import WITHIN, assert_no_process_left


def test_the_first_failing_rank_has_the_last_word(tmp_path, parwrap_run, script):
    path = script("""
import os, torch, torch.distributed as dist
def unhappy():
    raise ValueError("rank one is unhappy")
dist.init_process_group("gloo")
if os.environ["RANK"] == "1":
    unhappy()
dist.barrier()
""")
    status, stdout, stderr = parwrap_run("--nproc-per-node", "2", "--plain", path)

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


def test_a_killed_rank_is_named_before_those_that_miss_it(parwrap_run, script):
    path = script("""
import os, signal, torch, torch.distributed as dist
dist.init_process_group("gloo")
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
""")
    status, _, stderr = parwrap_run("--nproc-per-node", "2", "--plain", path)

    assert status == 128 + signal.SIGKILL
    assert stderr.endswith("rank 1 of 2 was killed by SIGKILL (out of memory?)\n")


@pytest.mark.parametrize(
    ("source", "outcome"),
    [
        ("import sys; sys.exit('no data')", (1, "", "no data\n")),
        ("import os; os._exit(3)", (3, "", "")),
        ("import os\nif os.environ['RANK'] == '1': os._exit(0)\nprint('done')", (0, "done\n", "")),
        (
            "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(99)",
            (7, "", "rank 1 of 2 exited with code 7\n"),
        ),
        (
            "import os, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 35)\ntime.sleep(99)",
            (128 + 35, "", "rank 1 of 2 was killed by signal 35\n"),
        ),
    ],
    ids=["a message", "without a word", "early and well", "one of them", "a signal without a name"],
)
def test_a_script_may_end_itself(parwrap_run, script, source, outcome):
    assert parwrap_run("--nproc-per-node", "2", "--plain", script(source)) == outcome


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
def test_a_script_that_has_trained_ends_as_under_plain_python(parwrap_run, script, ending, status, said):
    ended, _, stderr = parwrap_run("--nproc-per-node", "2", script(TRAINS + ending))

    assert status == ended
    assert stderr.endswith(said)
    assert bool(said) == ("Traceback" in stderr)


def test_a_question_that_nobody_can_answer(parwrap_run, script):
    status, said, stderr = parwrap_run("--nproc-per-node", "2", script("input('name? ')"))

    assert (1, "") == (status, said)
    assert stderr.endswith(
        "EOFError: input('name? ') was called on a launched rank, which has no stdin: pass the answer as an argument of the script.\n"
    )


def test_who_was_killed_before_a_restart_is_told(parwrap_run, script):
    path = script("""
import os
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), 9)
    while True:
        pass
print("trained")
""")
    options = ("--nproc-per-node", "2", "--plain", "--max-restarts", "1")

    assert (0, "trained\ntrained\n", "rank 1 of 2 was killed by SIGKILL (out of memory?)\n") == parwrap_run(*options, path)


def test_ranks_are_started_again_after_a_failure_and_have_logs(tmp_path, parwrap_run, script):
    path = script("""
import os, sys, torch.distributed as dist
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
print("attempt", attempt, flush=True)
dist.init_process_group("gloo")
if attempt == "0" and rank == "1":
    raise ValueError("not yet")
dist.barrier()
""")
    options = ("--nproc-per-node", "2", "--plain", "--max-restarts", "1", "--redirects", "3", "--log-dir", "logs")

    assert (0, "", "") == parwrap_run(*options, path)

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
        assert (number == signal.SIGINT) == stderr.startswith("rank 0 of 2 was interrupted:\nTraceback (most recent call last):\n")
        assert stderr.count("Traceback") == (number == signal.SIGINT)


def test_ctrl_c_of_which_no_rank_tells_is_told(started, environ, script):
    environ |= {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}  # there is nothing to set for ranks, of which one is not expected
    deaf = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_DFL)\nprint('up', flush=True)\ntime.sleep(999)"
    process = started("-m", "parwrap.run", "--nproc-per-node", "1", "--plain", script(deaf))
    assert process.stdout.readline() == "up\n"
    os.killpg(process.pid, signal.SIGINT)

    assert (130, "parwrap.run: interrupted\n") == (process.wait(WITHIN), process.stderr.read())


def test_a_run_outlives_its_terminal_under_nohup(tmp_path, started, script):
    path = script("""
import os, pathlib, time
pathlib.Path("begun-" + os.environ["RANK"]).touch()
while not pathlib.Path("hung up").exists():
    time.sleep(0.01)
""")
    nohup = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_IGN)
os.close(1)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
    process = started("-c", nohup, "-m", "parwrap.run", "--nproc-per-node", "2", "--plain", path)
    until = time.monotonic() + WITHIN
    while not all((tmp_path / f"begun-{rank}").exists() for rank in range(2)):
        assert time.monotonic() < until
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGHUP)
    (tmp_path / "hung up").touch()

    assert (0, "") == (process.wait(WITHIN), process.stderr.read())


def test_a_signal_that_comes_before_the_script_has_begun_ends_a_rank_too(started):
    """The fork server takes no notice of it; a rank that it has just forked has it when it is ready."""
    process = started(
        "-c",
        """
import os, signal
from parwrap.launching.elastic import fork_server
ranks = '''
from parwrap.launching.elastic.fork_server import BLOCKED
os.kill(os.getpid(), signal.SIGTERM)
if rank := os.fork():
    print("alive", os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]), flush=True)
else:
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED)
os._exit(0)
'''
if not (server := os.fork()):
    fork_server._serve(os.getppid(), [], "import os, signal" + ranks, [])
os.waitpid(server, 0)
""",
    )

    assert ("alive -15\n", "") == process.communicate(timeout=WITHIN)
