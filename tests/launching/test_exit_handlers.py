"""What a script leaves to its end, and signals that it handles: as under plain python, and once for all ranks."""

import os
import signal
import time

import pytest

from command_line import WITHIN

TRAINS = """
import atexit, concurrent.futures, json, logging, os, signal, sys, threading, time, torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(steps):
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 2)).square().mean().backward()
        optimizer.step()
        if step == 4:
            open("started", "w").close()
        if steps > 5:
            time.sleep(0.01)
"""

LEAVES = (
    TRAINS
    + """
def append(name, wait=0):
    time.sleep(wait)
    with open(name, "a") as file:
        file.write("once\\n")
class Log:
    def __del__(self):
        with open("dropped.txt", "a") as file:
            file.write("once\\n")
        print("dropped")
log = Log()
logging.basicConfig(filename="log.txt", level="INFO", format="%(message)s")
atexit.register(append, "atexit.txt")
atexit.register(logging.info, "once")
atexit.register(lambda: torch.save(torch.load("last.pt"), "again.pt"))
atexit.register(print, "at exit")
threading.Thread(target=append, args=("thread.txt", 0.3)).start()
concurrent.futures.ThreadPoolExecutor(1).submit(append, "pool.txt", 0.3)
train(5)
torch.save(model.state_dict(), "last.pt")
"""
)
NAMES = ("atexit.txt", "dropped.txt", "log.txt", "pool.txt", "thread.txt")


@pytest.mark.parametrize("ending", ["", "sys.exit()"], ids=["at its end", "by sys.exit"])
@pytest.mark.parametrize("ranks", ["2", "3"])
def test_what_runs_at_exit_writes_and_speaks_once(ending, ranks, tmp_path, parwrap_run, script):
    status, said, _ = parwrap_run("--nproc-per-node", ranks, script(LEAVES + ending))

    assert (0, "at exit\ndropped\n") == (status, said)
    assert dict.fromkeys(NAMES, "once\n") == {name: (tmp_path / name).read_text() for name in NAMES}
    assert {*NAMES, "again.pt", "last.pt", "started", "train.py"} == {*os.listdir(tmp_path)}


def test_what_runs_at_exit_after_an_error_writes_once(tmp_path, parwrap_run, script):
    status, _, stderr = parwrap_run("--nproc-per-node", "2", script(LEAVES + "raise ValueError('after training')"))

    assert status == 1
    assert stderr.endswith("ValueError: after training\n")
    for name in NAMES:
        assert not (tmp_path / name).exists() or (tmp_path / name).read_text() == "once\n"


HANDLES = "def leave(*signal):\n    torch.save(model.state_dict(), 'last.pt')\n    sys.exit(0)\n"
CATCHES = """
try:
    train(10**6)
except KeyboardInterrupt:
    time.sleep(1)  # a signal that came twice would come here
    torch.save(model.state_dict(), 'last.pt')
"""
WAYS = {
    "a handler that exits": HANDLES + "signal.signal(signal.SIGTERM, leave)\nsignal.signal(signal.SIGINT, leave)\ntrain(10**6)",
    "an exception that is caught": CATCHES,
    "an exception that a handler raises": "signal.signal(signal.SIGTERM, signal.default_int_handler)\n" + CATCHES,
    "no handler": "train(10**6)",
}


@pytest.mark.parametrize("whole_group", [False, True], ids=["to the command", "to all processes"])
@pytest.mark.parametrize(
    ("way", "number", "expected"),
    [
        ("a handler that exits", signal.SIGTERM, 0),
        ("a handler that exits", signal.SIGINT, 0),
        ("an exception that is caught", signal.SIGINT, 0),
        ("an exception that a handler raises", signal.SIGTERM, 0),
        ("no handler", signal.SIGTERM, 128 + signal.SIGTERM),
        ("no handler", signal.SIGINT, 128 + signal.SIGINT),
    ],
)
def test_a_signal_that_the_script_handles_on_every_rank_is_no_failure(way, number, expected, whole_group, tmp_path, started, script):
    process = started("-m", "parwrap.run", "--nproc-per-node", "2", script(TRAINS + WAYS[way]))
    until = time.monotonic() + WITHIN
    while not (tmp_path / "started").exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    (os.killpg if whole_group else os.kill)(process.pid, number)
    said, stderr = process.communicate(timeout=WITHIN)

    assert expected == process.returncode, f"stdout:\n{said}\nstderr:\n{stderr}"
    assert (expected == 0) == (tmp_path / "last.pt").exists()


@pytest.mark.parametrize("ranks", ["2", "3"])
def test_ranks_that_are_killed_leave_no_temporary_files(ranks, tmp_path, parwrap_run, script):
    writes = "import os, signal\nopen('log.txt', 'w').write('kept')\nprint(open('log.txt').read())\nos.kill(os.getpid(), signal.SIGKILL)\n"

    status, _, _ = parwrap_run("--nproc-per-node", ranks, script(writes))

    assert status == 128 + 9
    assert (tmp_path / "log.txt").read_text() == "kept"
