"""Processes and threads end with those that started them."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from parwrap.ranks.background import in_background

PARENT = """
import os, time
from parwrap.ranks.processes import die_with_parent

parent = os.getpid()
if os.fork() == 0:
    die_with_parent(parent)
    print(os.getpid(), flush=True)
    time.sleep(60)
time.sleep(60)
"""


def has_ended(pid: int, seconds: float = 10) -> bool:
    """Whether the process ends within ``seconds``. Nobody may have waited for it yet."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_a_process_dies_with_its_parent():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()

        assert has_ended(child)


def test_processes_are_imported_without_torch():
    """The launcher uses them before torch is imported."""
    command = "import sys, parwrap.ranks.processes, parwrap.ranks.background; sys.exit('torch' in sys.modules)"

    assert 0 == subprocess.run([sys.executable, "-c", command], timeout=60).returncode


def test_a_background_thread_ends_after_an_exception():
    threads = threading.active_count()
    stopped = []
    with pytest.raises(KeyError), in_background(lambda event: stopped.append(event.wait(10)), "parwrap test"):
        raise KeyError

    assert ([True], threads) == (stopped, threading.active_count())
