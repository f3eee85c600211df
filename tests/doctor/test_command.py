"""The command itself: alone, under a launcher, and where ranks hang, are missing or differ. Real processes, so few runs."""

import json
import os
import random
import re
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest

from parwrap.doctor import __main__ as command
from parwrap.doctor.facts import Examination
from parwrap.doctor.findings import Finding
from parwrap.launching.reexec import FOR_RANKS

ROOT = Path(__file__).parents[2]
WITHIN = 60
"""Seconds, far above what any of these takes."""

STUCK = """
import sys, time
from parwrap.doctor import exam
from parwrap.doctor.__main__ import examine
measure = exam.all_reduces
def stuck(rank, size, device, report):
    for number, row in enumerate(measure(rank, size, device, report)):
        yield row
        if (rank, number) == (1, 1):
            time.sleep(60)
exam.all_reduces = stuck
sys.exit(examine(float(sys.argv[1]), None, False))
"""
"""A doctor whose rank 1 hangs after the second size."""

OTHER = """
import runpy, torch
torch.distributed.Backend.register_backend("other", lambda *_: None, devices=["cpu"])
runpy.run_module("parwrap.doctor", run_name="__main__")
"""
"""A doctor where there is a backend of that name."""


@pytest.fixture
def doctor(tmp_path):
    """Start a doctor with some environment variables; gives the process, which is ended with the test."""
    processes = []

    def start(*arguments, **variables):
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("GLOO_", "TORCH_"))}
        environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path), **variables}
        started = [sys.executable, *(arguments or ("-m", "parwrap.doctor"))]
        processes.append(subprocess.Popen(started, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def warm_doctor(warm_python, tmp_path):
    """Run a module on which the doctor is called; gives exit code, stdout and stderr."""

    def run(*command, **variables):
        environ = {name: value for name, value in warm_python.environ.items() if not name.startswith("GLOO_")}
        return warm_python.run(*command, cwd=tmp_path, environ={**environ, **FOR_RANKS, "TMPDIR": str(tmp_path), **variables})[1:]

    return run


@pytest.fixture
def as_rank():
    """The variables of one of two ranks that meet at a free port.

    The system gives no such low port to a connection: a rank that knocks before the other listens could else connect to itself.
    """
    port = None
    while port is None:
        candidate = random.SystemRandom().randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", candidate)):
            port = str(candidate)
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    return lambda rank: place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}


def ended(process):
    """Exit code, stdout and stderr."""
    stdout, stderr = process.communicate(timeout=WITHIN)
    return process.returncode, stdout, stderr


def keys_of(kind):
    """The keys of a dataclass and of those in it."""
    for field in fields(kind):
        yield field.name
        hint = get_type_hints(kind)[field.name]
        for inner in (hint, *getattr(hint, "__args__", ())):
            if is_dataclass(inner):
                yield from keys_of(inner)


def test_alone_as_json_with_launch_variables_half_set(warm_doctor, tmp_path):
    code, stdout, stderr = warm_doctor("parwrap.doctor", "--json", RANK="1")
    printed = json.loads(stdout)
    (half_set,) = [finding for finding in printed["findings"] if "RANK is set but" in finding["problem"]]
    test = printed["self_test"]

    assert (1, 1, "") == (code, printed["exit_code"], stderr)
    assert half_set["serious"]
    assert "To start several ranks, use `parwrap run`" in half_set["remedy"]
    assert {"RANK": "1"} == printed["ranks"][0]["launch"]["variables"]
    assert ("forked", 2, None, 5) == (test["by"], test["ranks"], test["failure"], len(test["rows"]))
    assert all(row["right"] for row in test["rows"])
    assert [] == list(tmp_path.glob("parwrap-*/[!l]*"))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_report_that_cannot_be_written_is_one_line(warm_python, tmp_path):
    with open("/dev/full", "w") as full, open(tmp_path / "stderr", "w") as stderr:
        streams = (full.fileno(), full.fileno(), stderr.fileno())
        status = warm_python.start("parwrap.doctor", streams=streams, cwd=tmp_path).wait(WITHIN)

    expected = "parwrap doctor: the report cannot be written: No space left on device. Free some space, or write it elsewhere.\n"
    assert (2, expected) == (status, (tmp_path / "stderr").read_text())


def test_under_a_launcher_ranks_are_examined_together_and_one_prints(warm_doctor):
    code, stdout, stderr = warm_doctor("parwrap.run", "--nproc-per-node", "2", "-m", "parwrap.doctor")

    assert "" == stderr
    assert int("\nproblem " in stdout) == code
    assert 1 == stdout.count("self test")
    assert re.search(r"^launch     parwrap run: 2 ranks; rank 0 has RANK=0 WORLD_SIZE=2 ", stdout, re.MULTILINE)
    assert re.search(r"^network    gloo listens at lo0? \(127\.0\.0\.1\), by GLOO_SOCKET_IFNAME", stdout, re.MULTILINE)
    assert re.search(r"^self test  2 launched ranks, \w+ on \w+: all sums right\n +all-reduce .*\n +1 KB .*us", stdout, re.MULTILINE)
    assert re.search(r"^clocks     at most [\d.]+ ms from rank 0's \(rank 1\)", stdout, re.MULTILINE)


@pytest.mark.slow
def test_ranks_of_mpi_meet_in_a_folder(doctor):
    place = {"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}
    ranks = [doctor(**place, PMI_RANK=str(rank), MPI_LOCALRANKID=str(rank)) for rank in range(2)]
    (_, stdout, stderr), (other_code, *others) = map(ended, ranks)

    assert (0, ["", ""], "") == (other_code, others, stderr)
    assert "self test  2 launched ranks, gloo on cpu: all sums right" in stdout


@pytest.mark.slow
def test_a_hang_between_launched_ranks_ends_in_time_and_shows_where_they_are(doctor, as_rank):
    ranks = [doctor("-c", STUCK, "4", **as_rank(rank)) for rank in range(2)]
    (code, stdout, _), (other_code, other_stdout, other_stderr) = map(ended, ranks)

    assert (1, 1, "") == (code, other_code, other_stdout)
    assert re.search(r"^problem    the self test with gloo failed: .*(Timed out|not finished)", stdout, re.MULTILINE)
    assert "; rank 0 at: all-reduce of 256 KB; rank 1 at: all-reduce of 16 KB. Remedy: " in stdout
    assert re.search(r"^ +16 KB .*GB/s$", stdout, re.MULTILINE)
    assert re.search(
        r"^parwrap doctor: rank 1 on \S+ failed at 'all-reduce of 16 KB': not finished after 4 s\. The report of",
        other_stderr,
        re.MULTILINE,
    )


@pytest.mark.slow
def test_a_hang_of_forked_ranks_ends_in_time(doctor):
    code, stdout, _ = ended(doctor("-c", STUCK, "2"))

    assert 1 == code
    assert re.search(r"^problem    the self test with gloo failed: .*rank 1 at: all-reduce of 16 KB. Remedy: ", stdout, re.MULTILINE)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_that_never_comes(doctor, as_rank, rank):
    variables = as_rank(rank)
    code, *printed = ended(doctor("-m", "parwrap.doctor", "--timeout", "1", **variables))

    assert 1 == code
    assert f"rank {rank}" in printed[rank]
    waiting = f"waiting for all ranks to meet at 127.0.0.1:{variables['MASTER_PORT']}"
    assert (f"at: {waiting}" if rank == 0 else f"at '{waiting}'") in printed[rank]
    assert "Remedy: check that all ranks were started, and that each machine can reach" in printed[0] or rank == 1
    assert "frame #" not in printed[1]


def test_ranks_that_would_wait_for_each_other_forever_are_not_started(doctor, as_rank):
    ranks = [doctor("-c", OTHER, "--backend", backend, **as_rank(rank)) for rank, backend in enumerate(["gloo", "other"])]
    (code, stdout, _), (other_code, *_) = map(ended, ranks)

    assert (1, 0) == (code, other_code)
    assert "\nself test  not run: ranks would use different backends" in stdout
    assert "ranks have different backends: gloo on rank 0; other on rank 1. Remedy: pass `--backend gloo`" in stdout


def test_without_torch_it_cannot_run(doctor):
    program = "import sys, runpy; sys.modules['torch'] = None; runpy.run_module('parwrap.doctor', run_name='__main__')"
    code, stdout, stderr = ended(doctor("-c", program))

    assert (2, "") == (code, stdout)
    assert "install parwrap, with torch, into the environment of" in stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--backend", "mpi"], "parwrap doctor: backend='mpi' is not available in this build of torch, which has gloo"),
        *(
            (["--timeout", seconds], f"--timeout: {seconds} is not a number of seconds between 0 and 1000000")
            for seconds in ("0", "-1", "nan", "inf", "x")
        ),
    ],
)
def test_options_that_make_no_sense(monkeypatch, capsys, arguments, text):
    monkeypatch.setattr(sys, "argv", ["doctor", *arguments])
    try:
        code = command.main()
    except SystemExit as left:
        code = left.code

    assert 2 == code
    assert text in capsys.readouterr().err


def test_every_key_of_the_json_is_documented():
    documented = set(re.findall(r"``(\w+)``", (ROOT / "docs" / "doctor.rst").read_text()))
    keys = {*keys_of(Examination), *(field.name for field in fields(Finding)), "findings", "exit_code"}

    assert {"host", "quota", "algorithm_bandwidth"} <= keys
    assert set() == keys - documented
