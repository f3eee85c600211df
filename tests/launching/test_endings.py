"""How a run ends: by a rank's failure, by the script's decision, or by a signal, and what the user reads."""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from launched import WITHIN, assert_no_process_left, left_in


def test_the_first_failing_rank_has_the_last_word(tmp_path, parwrap_run, script):
    path = script("""
import parwrap
def unhappy():
    raise ValueError("rank one is unhappy")
parwrap.barrier()
if parwrap.rank() == 1:
    unhappy()
parwrap.barrier()
""")
    status, stdout, stderr = parwrap_run("--nproc-per-node", "2", path)

    assert (1, "") == (status, stdout)
    assert re.sub(r" +[~^]+\n", "", stderr).endswith(  # Python 3.13 marks a call
        f"""\
rank 1 of 2 failed:
Traceback (most recent call last):
  File "{tmp_path}/train.py", line 7, in <module>
    unhappy()
  File "{tmp_path}/train.py", line 4, in unhappy
    raise ValueError("rank one is unhappy")
ValueError: rank one is unhappy
"""
    ), stderr
    assert re.sub(r"rank 0 of 2 failed later at train.py:8: .*\n", "", stderr).startswith("rank 1 of 2 failed:")
    assert 1 == stderr.count("Traceback")


def test_an_error_that_an_option_names_has_the_last_word(parwrap_run, script):
    path = script("import torch\ntorch.nn.functional.rrelu(torch.ones(2).half(), training=True)\n")
    status, _, stderr = parwrap_run("--nproc-per-node", "2", "--amp", "fp16", path)

    assert (1, True) == (status, 'train.py", line 2, in <module>' in stderr)
    assert stderr.splitlines()[-1].startswith("parwrap.errors.UsageError: rrelu_with_noise_out_cpu does not exist for float16 on cpu: ")


def test_a_killed_rank_is_named_before_those_that_lose_their_connection(parwrap_run, script):
    path = script("""
import os, signal, parwrap
open("log.txt", "w").write("kept")
parwrap.barrier()
if parwrap.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
parwrap.barrier()
""")
    status, _, stderr = parwrap_run("--nproc-per-node", "2", path)

    assert 128 + signal.SIGKILL == status
    assert stderr.endswith("rank 1 of 2 was killed by SIGKILL (out of memory?)\n"), stderr


@pytest.mark.parametrize(
    ("source", "outcome"),
    [
        ("import sys; sys.exit('no data')", (1, "", "no data\n")),
        pytest.param("import os; os._exit(3)", (3, "", ""), marks=pytest.mark.slow),
        ("import os\nif os.environ['RANK'] == '1': os._exit(0)\nprint('done')", (0, "done\n", "")),
        (
            "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(99)",
            (7, "", "rank 1 of 2 exited with code 7\n"),
        ),
        pytest.param(
            "import os, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 35)\ntime.sleep(99)",
            (128 + 35, "", "rank 1 of 2 was killed by signal 35\n"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["a message", "silently", "early and well", "one of them", "a signal without a name"],
)
def test_a_script_may_end_itself(parwrap_run, script, source, outcome):
    assert outcome == parwrap_run("--nproc-per-node", "2", "--plain", script(source))


IMPATIENT = (
    "import runpy; from parwrap.launching import agent; agent.LEFT_ALONE = 0.3; runpy.run_module('parwrap.run', run_name='__main__')"
)


@pytest.mark.parametrize("waits", ["parwrap.barrier()", "import time; time.sleep(99)"])
def test_a_rank_that_leaves_silently_ends_the_others(started, environ, script, waits):
    """Those lose their connection, or go on."""
    path = script(f"import os, parwrap\nif parwrap.rank() == 1: os._exit(0)\n{waits}")
    process = started("-c", IMPATIENT, "--nproc-per-node", "2", path)
    _, stderr = process.communicate(timeout=WITHIN)
    assert_no_process_left(process.pid)

    assert 1 == process.returncode
    assert stderr.endswith(
        "rank 1 of 2 ended with code 0 before the end of the script, and other ranks went on without it: call sys.exit() instead of "
        "os._exit(0), on all ranks\n"
    ), stderr
    assert [] == left_in(environ)


def test_all_ranks_may_leave_silently(parwrap_run, script):
    path = script("import os, time, parwrap\nprint('done', flush=True)\ntime.sleep(0.5 * (parwrap.rank() == 0))\nos._exit(0)")

    assert (0, "done\n", "") == parwrap_run("--nproc-per-node", "2", path)


LEAVES = """
import atexit, os, signal, sys, threading, time, parwrap
from parwrap.loop import interrupts
interrupts.LONGEST = 0.3  # no backward comes
rank = parwrap.rank()
def note(text):
    os.write(notes, f"{rank} {text}\\n".encode())
class Log:
    def __init__(self):
        self.text = f"{rank} dropped\\n".encode()
    def __del__(self, write=os.write, notes=notes):
        write(notes, self.text)
log = Log()
atexit.register(note, "at exit")
threading.Thread(target=lambda: (time.sleep(0.2), note("thread"))).start()
parwrap.barrier()
try:
    if sys.argv[1] == "fails" and rank == 1:
        raise ValueError("after training")
    if sys.argv[1] == "waits":
        note("waits")
        time.sleep(99)
    if sys.argv[1] == "fails":
        time.sleep(99)
    if sys.argv[1] == "exits":
        sys.exit()
finally:
    time.sleep(0.1)
    note("finally")
"""


@pytest.fixture
def leaving(tmp_path, script):
    """The script, which notes what it does on every rank."""
    notes = tmp_path / "notes.txt"
    notes.touch()
    path = script(
        LEAVES.replace(
            "rank = ", f"with parwrap.every_rank_writes():\n    notes = os.open({str(notes)!r}, os.O_WRONLY | os.O_APPEND)\nrank = "
        )
    )
    return path, lambda: sorted(notes.read_text().splitlines())


@pytest.mark.parametrize("how", [pytest.param("ends", marks=pytest.mark.slow), "exits"])
def test_threads_and_exit_handlers_run_at_the_end(parwrap_run, leaving, how):
    path, noted = leaving

    assert (0, "", "") == parwrap_run("--nproc-per-node", "2", path, how)
    assert ["0 at exit", "0 dropped", "0 finally", "0 thread", "1 at exit", "1 finally", "1 thread"] == noted()


def test_after_a_failure_finally_blocks_run_on_all_ranks_and_exit_handlers_on_rank_0(parwrap_run, leaving):
    """Rank 0 sleeps: the launcher ends it, and waits for its ``finally`` block."""
    path, noted = leaving
    began = time.monotonic()
    status, _, stderr = parwrap_run("--nproc-per-node", "2", path, "fails")

    assert 1 == status
    assert stderr.startswith("rank 1 of 2 failed:\n")
    assert stderr.endswith("ValueError: after training\n")
    assert {"0 finally", "1 finally", "0 at exit"} <= {*noted()} - {"0 thread", "1 thread"} <= {"0 finally", "1 finally", "0 at exit"}
    assert time.monotonic() - began < 15


@pytest.mark.parametrize(
    ("number", "status", "to_all"),
    [
        (signal.SIGTERM, 143, False),
        (signal.SIGINT, 130, True),
        pytest.param(signal.SIGTERM, 143, True, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 130, False, marks=pytest.mark.slow),
    ],
)
def test_a_signal_runs_finally_blocks_once_and_ends_all(started, environ, leaving, number, status, to_all):
    path, noted = leaving
    process = started("-m", "parwrap.run", "--nproc-per-node", "2", path, "waits")
    until = time.monotonic() + WITHIN
    while len([line for line in noted() if line.endswith("waits")]) < 2:
        assert time.monotonic() < until
        time.sleep(0.02)
    (os.killpg if to_all else os.kill)(process.pid, number)
    _, stderr = process.communicate(timeout=WITHIN)
    assert_no_process_left(process.pid)

    assert status == process.returncode
    assert ["0 finally", "1 finally"] == [line for line in noted() if line.endswith("finally")]
    assert [] == left_in(environ)
    assert (number == signal.SIGINT) == stderr.startswith("rank 0 of 2 was interrupted:\nTraceback (most recent call last):\n"), stderr
    assert (number == signal.SIGINT) == stderr.count("Traceback")


HANDLES = """
import os, signal, sys, time, parwrap
from parwrap.loop import interrupts
interrupts.LONGEST = 0.3  # no backward comes
def leave(*signal):
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
try:
    os.write(1, b"up\\n")
    time.sleep(99)
except KeyboardInterrupt:
    time.sleep(1)  # a signal that comes twice would come here
"""


@pytest.mark.parametrize(("number", "to_all"), [pytest.param(signal.SIGTERM, False, marks=pytest.mark.slow), (signal.SIGINT, True)])
def test_a_signal_that_the_script_handles_on_every_rank_is_no_failure(started, script, number, to_all):
    process = started("-m", "parwrap.run", "--nproc-per-node", "2", "--all-ranks", script(HANDLES))
    up = [process.stdout.readline() for _ in range(2)]
    (os.killpg if to_all else os.kill)(process.pid, number)
    _, stderr = process.communicate(timeout=WITHIN)

    assert ["[rank 0] up\n", "[rank 1] up\n"] == sorted(up)
    assert (0, "") == (process.returncode, stderr)


SAVES = """
import os, signal, time
told = []
for number in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, frame: told.append(os.write(1, f"{signal.Signals(number).name}\\n".encode())))
os.write(1, b"up\\n")
while len(told) < 3:
    time.sleep(0.02)
time.sleep(1)  # a signal that comes twice would come here
"""


def test_the_script_is_sent_its_own_signals_once_on_every_rank(started, script):
    process = started("-m", "parwrap.run", "--nproc-per-node", "2", "--all-ranks", script(SAVES))
    read = [process.stdout.readline() for _ in range(2)]
    for _ in range(2):
        os.kill(process.pid, signal.SIGUSR1)
        read += [process.stdout.readline() for _ in range(2)]
        time.sleep(0.6)  # two signals, which are not one from two senders
    os.killpg(process.pid, signal.SIGUSR2)  # as a scheduler does
    stdout, stderr = process.communicate(timeout=WITHIN)

    expected = [f"[rank {rank}] {text}\n" for rank in (0, 1) for text in ("SIGUSR1", "SIGUSR1", "SIGUSR2", "up")]
    assert expected == sorted([*read, *stdout.splitlines(keepends=True)])
    assert (0, "") == (process.returncode, stderr)


def test_the_next_start_removes_what_a_killed_launcher_has_left(started, environ, script, parwrap_run):
    process = started("-m", "parwrap.run", "--nproc-per-node", "2", "--all-ranks", script(HANDLES))
    for _ in range(2):
        process.stdout.readline()
    process.kill()
    process.communicate(timeout=WITHIN)
    assert_no_process_left(process.pid)
    left = [path for path in left_in(environ) if "parwrap" in path]
    for sockets in Path(environ["TMPDIR"]).glob("pymp-*"):  # the interpreter's own
        shutil.rmtree(sockets)

    assert (0, "", "") == parwrap_run("--nproc-per-node", "2", script("", "next.py"))
    assert 1 == len(left)


def test_a_question_that_nobody_can_answer_and_a_program_in_the_place_of_a_rank(parwrap_run, script):
    path = script("""
import os, pathlib, subprocess, sys
told = []
def cat():
    subprocess.run(["cat"], check=True, stderr=subprocess.DEVNULL)
def replace():
    assert 0 == os.spawnlp(os.P_WAIT, "true", "true")  # in a process of its own
    os.execlp("true", "true")
others = lambda: open(0), lambda: pathlib.Path('/dev/stdin').read_text(), lambda: os.read(0, 1), cat, replace
for ask in (lambda: input('name? '), lambda: sys.stdin.read(), lambda: list(sys.stdin), breakpoint, *others):
    try:
        ask()
    except Exception as error:
        told.append(f"{type(error).__name__}: {error}")
raise ValueError(told)
""")
    status, stdout, stderr = parwrap_run("--nproc-per-node", "2", path, stdin=subprocess.PIPE)
    read = "EOFError: sys.stdin was read on a launched rank, which has no stdin: pass the answer as an argument of the script."
    asked = "EOFError: input('name? ') was called on a launched rank, which has no stdin: pass the answer as an argument of the script."
    stopped = "UsageError: breakpoint() was called on a launched rank, which has no terminal: debug on one rank, with --nproc-per-node 1."

    assert (1, "") == (status, stdout)
    replaced = (
        "UsageError: train.py:8 calls os.execv, which replaces this rank by a program that is not a rank: 2 separate programs would run. "
        "If the script starts itself again to set a variable, set the variable before the command: `NAME=value parwrap run ...`."
    )
    opened = [asked.replace("input('name? ')", f"open({name})") for name in ("0", "PosixPath('/dev/stdin')")]
    unread = ["OSError: [Errno 9] Bad file descriptor", "CalledProcessError: Command '['cat']' returned non-zero exit status 1."]
    assert stderr.endswith(f"ValueError: {[asked, read, read, stopped, *opened, *unread, replaced]}\n"), stderr


def test_ranks_are_started_again_after_a_failure_and_have_logs(tmp_path, parwrap_run, script):
    path = script("""
import os
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
print("attempt", attempt, flush=True)
if attempt == "0" and rank == "1":
    os.kill(os.getpid(), 9)
if attempt == "0":
    while True: pass
if attempt == "1" and rank == "0":
    raise ValueError("not yet")
if attempt == "1":
    while True: pass
""")
    options = ("--nproc-per-node", "2", "--plain", "--max-restarts", "2", "--redirects", "3", "--log-dir", "logs")
    assert (0, "", "rank 1 of 2 was killed by SIGKILL (out of memory?)\n") == parwrap_run(*options, path)

    (logs,) = (tmp_path / "logs").iterdir()
    assert (logs / "attempt_1" / "0" / "stdout.log").read_text() == "attempt 1\n"
    assert (logs / "attempt_1" / "0" / "stderr.log").read_text().endswith("ValueError: not yet\n")
    assert (logs / "attempt_2" / "1" / "stdout.log").read_text() == "attempt 2\n"


def test_ranks_that_start_again_inside_the_scope_meet_anew(tmp_path, parwrap_run, script):
    path = script("""
import os, parwrap
first = parwrap.all_ranks(not os.path.exists("started"))
if parwrap.rank() == 0:
    open("started", "w").close()
if first and parwrap.rank() == 1:
    os._exit(3)
if parwrap.reduce_sum(1.0) == 2.0 and parwrap.rank() == 0:
    open("trained", "w").close()
""")
    status, _, stderr = parwrap_run("--nproc-per-node", "2", "--max-restarts", "1", path)

    assert 0 == status
    *lost, ended = sorted(stderr.splitlines())
    assert "rank 1 of 2 exited with code 3" == ended
    assert len(lost) <= 1  # rank 0 may notice that it has lost rank 1 before it is ended
    closed = "LockstepError: the ranks have come apart, because the connection to another rank has closed"
    assert all(re.fullmatch(rf"rank 0 of 2 failed later at \S+:[38]: {closed}", line) for line in lost), lost
    assert (tmp_path / "trained").exists()


def test_ctrl_c_that_no_rank_reports_is_reported(started, environ, script):
    environ |= {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}  # there is nothing to set for ranks, of which one is not expected
    deaf = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_DFL)\nprint('up', flush=True)\ntime.sleep(999)"
    process = started("-m", "parwrap.run", "--nproc-per-node", "1", "--plain", script(deaf))
    assert process.stdout.readline() == "up\n"
    os.killpg(process.pid, signal.SIGINT)

    assert (130, "parwrap run: interrupted\n") == (process.wait(WITHIN), process.stderr.read())


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
    """The fork server ignores it; a rank that it has just forked receives it when it is ready."""
    process = started(
        "-c",
        """
import os, signal
from parwrap.launching import fork_server
ranks = '''
from parwrap.launching.fork_server import BLOCKED
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
