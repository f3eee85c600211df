"""Runs of the command, as fixtures: each in a separate directory, and nothing may be left of it."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
WITHIN = 60
"""Seconds, far above what any of these takes."""
UNSET = ("OMP_NUM_THREADS", "PYTHONHASHSEED", "PYTHONUNBUFFERED", "LOGLEVEL")

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: of several processes with a thread for each core, most wait
# a shell starts background jobs with SIGINT ignored, which commands would inherit
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    """A directory with a script and a package."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "digits.py").touch()


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


@contextmanager
def ended_with_the_test():
    """A way to start commands, as ``Popen`` does; what was started is ended with the block."""
    processes = []

    def start(*command: str, **options) -> subprocess.Popen:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
        processes.append(process)
        return process

    try:
        yield start
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.fixture
def started(tmp_path, environ):
    """Start a command in ``tmp_path``; it is ended with the test."""
    with ended_with_the_test() as start:
        yield partial(start, sys.executable, cwd=tmp_path, env=environ, start_new_session=True)


@pytest.fixture
def parwrap_run(warm_python, started, tmp_path, environ):
    """Run ``parwrap run`` to its end and see that it leaves nothing behind; gives its exit code, stdout and stderr."""

    def run_to_its_end(*arguments: str, stdin: int | None = None) -> tuple[int, str, str]:
        if stdin is None and warm_python.can_run(environ):
            pid, status, stdout, stderr = warm_python.run("parwrap.run", *arguments, cwd=tmp_path, environ=environ)
        else:
            process = started("-m", "parwrap.run", *arguments, stdin=stdin)
            stdout, stderr = process.communicate(timeout=WITHIN)
            pid, status = process.pid, process.returncode
        assert_no_process_left(pid)
        assert not (left := left_in(environ)), left
        return status, stdout, stderr

    return run_to_its_end


def left_in(environ: dict[str, str]) -> list[str]:
    """What a run has left among the temporary files, apart from torch's caches and the empty folder of this user."""
    folder = Path(environ["TMPDIR"])
    found = [path.relative_to(folder) for path in (*folder.iterdir(), *folder.glob("parwrap-*/*"))]
    return [
        str(path) for path in found if not path.name.startswith("torchinductor_") and path.name not in (f"parwrap-{os.getuid()}", "lock")
    ]


def assert_no_process_left(session: int) -> None:
    until = time.monotonic() + WITHIN
    while left := [other for other in psutil.process_iter() if is_of_session(other, session)]:
        assert time.monotonic() < until, left
        time.sleep(0.01)


def is_of_session(process: psutil.Process, session: int) -> bool:
    try:
        return os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False
