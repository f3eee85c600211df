"""What ranks say is shown with their number, or kept in a file for each."""

import os
import re
import threading
import time
from contextlib import contextmanager

import pytest

from parwrap.launching import output as launchers_output
from parwrap.launching.output import Lines, RankOutput

WITHIN = 20
"""Seconds, far above what it takes."""

SPEAKING = """
import os, sys, time, parwrap
print("begun", parwrap.rank(), "\\n" * 3 + "x" * 100_000)
for percent in range(0, 101, 50):
    sys.stderr.write(f"\\r{percent} %")
sys.stderr.write("\\n")
parwrap.barrier()  # what a child says is shown from every rank
os.system("echo from a child")
parwrap.barrier()
print("no end of line", end="", flush=True)
if parwrap.rank() == 1:
    raise ValueError("unhappy")
parwrap.barrier()
"""


@pytest.mark.parametrize("start_method", ["forkserver", *(pytest.param(each, marks=pytest.mark.slow) for each in ("spawn", "fork"))])
def test_all_ranks_speak_in_whole_lines_with_their_number(parwrap_run, script, start_method):
    options = ("--all-ranks", "--start-method", start_method, "--nproc-per-node", "2")
    status, stdout, stderr = parwrap_run(*options, script(SPEAKING))

    assert 1 == status
    for rank in (0, 1):
        said = [f"begun {rank} ", "", "", "x" * 100_000, "from a child", "no end of line"]
        assert [f"[rank {rank}] {line}" for line in said] == [line for line in stdout.splitlines() if line.startswith(f"[rank {rank}]")]
        assert f"[rank {rank}] 100 %\n" in stderr
    assert 12 == stdout.count("\n")
    assert "50 %" not in stderr
    assert stderr.endswith("\nValueError: unhappy\n")
    assert 1 == stderr.count("ValueError: unhappy")


@pytest.mark.parametrize(
    ("chunks", "line"),
    [
        ((b"0%\r", b"50%\r", b"done\n"), b"done"),
        ((b"\r0%", b"\r50%", b"\rdone", b"\n"), b"done"),
        ((b"0", b"%\r5", b"0%", b"\r\n"), b"50%"),
        ((b"\r", b"\r", b"done\r", b"\r\n"), b"done"),
    ],
)
def test_of_a_line_that_overwrites_itself_its_last_state_is_shown(chunks, line):
    lines = Lines()

    assert [line] == [each for chunk in chunks for each in lines.take(chunk)]


def test_each_rank_has_a_file_of_what_it_says(tmp_path, parwrap_run, script):
    path = script(SPEAKING)
    status, stdout, stderr = parwrap_run("--log-dir", "logs/first", "--nproc-per-node", "2", path)
    logs = [(tmp_path / "logs" / "first" / f"rank_{rank}.log").read_bytes().decode() for rank in (0, 1)]

    assert 1 == status
    assert stdout.startswith("begun 0 ")
    assert "begun 1" not in stdout
    assert "\n0 %\n50 %\n100 %\n" in stderr  # it moves, on a terminal: the test sees that as lines
    for rank, log in enumerate(logs):
        assert log.startswith(f"begun {rank} \n\n\nxxx")
        assert all(part in log for part in ("\r0 %\r50 %\r100 %\n", "from a child\n", "no end of line"))
    assert ["ValueError: unhappy" in log for log in logs] == [False, True]


def test_log_files_continue_after_a_restart(tmp_path, parwrap_run, script):
    path = script("""
import os
print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"])
assert (os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]) != ("0", "1"), "not yet"
""")
    assert 0 == parwrap_run("--plain", "--nproc-per-node", "2", "--max-restarts", "1", "--log-dir", "logs", path)[0]

    log = re.sub(r"(?s)rank 1 of 2 failed:.*AssertionError", "AssertionError", (tmp_path / "logs" / "rank_1.log").read_text())
    assert re.fullmatch(r"attempt 0\nAssertionError: not yet\n--- started again at .* ---\nattempt 1\n", log)


@pytest.mark.slow
def test_a_line_that_was_not_whole_before_a_restart_is_one_by_itself(tmp_path, parwrap_run, script):
    path = script("""
import os
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    print("at 40%", end="", flush=True)
    os._exit(3)
print("trained")
""")
    options = ("--plain", "--nproc-per-node", "1", "--start-method", "spawn", "--max-restarts", "1", "--all-ranks", "--log-dir", "logs")
    status, said, _ = parwrap_run(*options, path)

    assert (0, "[rank 0] at 40%\n[rank 0] trained\n") == (status, said)
    assert re.fullmatch(r"at 40%\n--- started again at .* ---\ntrained\n", (tmp_path / "logs" / "rank_0.log").read_text())


def test_the_launcher_does_not_wait_for_a_process_that_outlives_its_rank(started, script):
    """It leaves its process group, and ends when no process reads its output."""
    path = script("import subprocess\nsubprocess.Popen(['yes'], start_new_session=True)")
    run = started("-m", "parwrap.run", "--plain", "--nproc-per-node", "2", "--all-ranks", path)
    run.communicate(timeout=60)

    assert 0 == run.returncode


@contextmanager
def launcher(tmp_path, stdout, log_dir=None, everyone=True):
    """The launcher of one rank, which passes on what it says to a descriptor instead of to its stdout; gives the rank's way to say it."""
    (tmp_path / "pipes").mkdir()
    output = RankOutput(tmp_path / "pipes", 1, everyone, log_dir and str(log_dir))

    def write(text: bytes) -> None:
        writing = threading.Thread(target=(tmp_path / "pipes" / "0.out").write_bytes, args=(text,), daemon=True)
        writing.start()
        writing.join(WITHIN)
        assert not writing.is_alive(), "nobody reads what the rank says"

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(launchers_output.STREAMS, "out", stdout)
        with output.passed_on():
            output.begin({0: 0})
            yield write


MUCH = b"".join(b"line %d\n" % number for number in range(30_000))


def test_a_rank_does_not_wait_for_room_on_a_disk_for_its_file(tmp_path, capfd):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank_0.log").symlink_to("/dev/full")
    with launcher(tmp_path, 1, tmp_path / "logs", everyone=False) as write:
        write(MUCH)
    stdout, stderr = capfd.readouterr()

    assert MUCH == stdout.encode()
    assert f"parwrap: from now on, the ranks' output is no longer in {tmp_path}/logs/rank_0.log: No space left on device\n" == stderr


def test_a_rank_does_not_wait_for_room_where_stdout_leads(tmp_path, capfd):
    full = os.open("/dev/full", os.O_WRONLY)
    with launcher(tmp_path, full, tmp_path / "logs") as write:
        write(MUCH)
    os.close(full)

    assert MUCH == (tmp_path / "logs" / "rank_0.log").read_bytes()
    assert "parwrap: from now on, the ranks' output is no longer shown: No space left on device\n" == capfd.readouterr().err


def test_nothing_is_lost_when_stdout_does_not_block(tmp_path):
    """A terminal is that for everybody once a single process has set it so."""
    read, stdout = os.pipe()
    os.set_blocking(stdout, False)
    shown = []
    with open(read, "rb") as slow:

        def look() -> None:
            time.sleep(0.1)
            shown.extend(slow)

        looking = threading.Thread(target=look)
        looking.start()
        with launcher(tmp_path, stdout) as write:
            write(MUCH)
        os.close(stdout)
        looking.join()

    assert [b"[rank 0] " + line for line in MUCH.splitlines(keepends=True)] == shown


TRAINING = """
import logging, logging.config
logging.basicConfig(level=logging.DEBUG)
logging.config.dictConfig({"version": 1})
import torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for (x,) in DataLoader(TensorDataset(torch.ones(8, 1)), shuffle=True):
    model(x).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(("level", "lines"), [("info", ["read 4 of 8 samples", "4 steps, 1 epoch"]), ("quiet", [])])
def test_the_variable_of_the_log_chooses_lines_that_a_configuration_of_the_script_leaves_alone(level, lines, script, environ, parwrap_run):
    environ["PARWRAP_LOG"] = level
    status, stdout, stderr = parwrap_run("--nproc-per-node", "2", script(TRAINING))
    said = stderr.splitlines()

    assert (0, "", len(lines)) == (status, stdout, len(said)), stderr
    assert all(line.startswith("parwrap: ") and part in line for line, part in zip(said, lines, strict=True)), stderr
