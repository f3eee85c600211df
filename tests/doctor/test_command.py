"""The command itself: alone, under a launcher, and where ranks hang, are missing or differ. Real processes, so few runs."""

import json
import multiprocessing.heap
import os
import re
import socket
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest

from command_line import ended_with_the_test
from parwrap import run
from parwrap.doctor import __main__ as command
from parwrap.doctor import command as doctor_command
from parwrap.doctor.command import examine
from parwrap.doctor.exam import ForkedExam
from parwrap.doctor.facts import Examination
from parwrap.doctor.findings import Finding
from parwrap.doctor.gather import gather

ROOT = Path(__file__).parents[2]
WITHIN = 60
"""Seconds, far above what any of these takes."""

STUCK = """
import sys, time
from parwrap.doctor import exam
from parwrap.doctor import command as doctor_command
from parwrap.doctor.command import examine
from parwrap.doctor.exam import ForkedExam
measure = exam.all_reduces
def stuck(rank, size, device, tell):
    for number, row in enumerate(measure(rank, size, device, tell)):
        yield row
        if (rank, number) == (1, 1):
            time.sleep(60)
exam.all_reduces = stuck
sys.exit(examine(float(sys.argv[1]), None, False))
"""
"""A doctor whose rank 1 hangs after the second size."""


@pytest.fixture
def doctor():
    """Start a doctor with some environment variables; gives the process, which is ended with the test."""

    with ended_with_the_test() as start:

        def start_doctor(*arguments, **variables):
            environ = {name: value for name, value in os.environ.items() if not name.startswith(("GLOO_", "TORCH_"))}
            environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
            return start(sys.executable, *(arguments or ("-m", "parwrap.doctor")), env=environ)

        yield start_doctor


@pytest.fixture
def as_rank():
    """The variables of one of two ranks that meet at a free port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    return lambda rank: place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}


def ended(process):
    """Exit code, stdout and stderr."""
    stdout, stderr = process.communicate(timeout=WITHIN)
    return process.returncode, stdout, stderr


def paths(kind):
    """The keys of a dataclass and of those in it."""
    for field in fields(kind):
        yield field.name
        hint = get_type_hints(kind)[field.name]
        for inner in (hint, *getattr(hint, "__args__", ())):
            if is_dataclass(inner):
                yield from paths(inner)


def test_alone_as_json_with_launch_variables_half_set(doctor):
    code, stdout, stderr = ended(doctor("-m", "parwrap.doctor", "--json", RANK="1"))
    told = json.loads(stdout)
    (half_set,) = [finding for finding in told["findings"] if "RANK is set but" in finding["problem"]]
    test = told["self_test"]

    assert (1, 1) == (code, told["exit_code"])
    assert "Traceback" not in stderr
    assert half_set["serious"]
    assert "To start several, use `python -m parwrap.run`" in half_set["remedy"]
    assert {"RANK": "1"} == told["ranks"][0]["launch"]["variables"]
    assert ("forked", 2, None, 5, True) == (
        *(test[name] for name in ("by", "ranks", "failure")),
        len(test["rows"]),
        all(row["right"] for row in test["rows"]),
    )


def test_under_a_launcher_ranks_are_examined_together_and_one_tells(doctor):
    code, stdout, stderr = ended(doctor("-m", "parwrap.run", "--nproc-per-node", "2", "-m", "parwrap.doctor"))

    assert "" == stderr
    assert int("\nproblem " in stdout) == code
    assert 1 == stdout.count("self test")
    assert re.search(r"^launch     parwrap.run: 2 ranks; rank 0 has RANK=0 WORLD_SIZE=2 ", stdout, re.MULTILINE)
    assert re.search(r"^network    gloo listens at lo0? \(127\.0\.0\.1\), by GLOO_SOCKET_IFNAME", stdout, re.MULTILINE)
    assert re.search(r"^self test  2 launched ranks, \w+ on \w+: all sums right\n +all-reduce .*\n +1 KB .*us", stdout, re.MULTILINE)
    assert re.search(r"^clocks     at most [\d.]+ ms from rank 0's \(rank 1\)", stdout, re.MULTILINE)


def test_a_hang_between_launched_ranks_ends_in_time_and_tells_where_they_are(doctor, as_rank):
    ranks = [doctor("-c", STUCK, "6", **as_rank(rank)) for rank in range(2)]
    (code, stdout, _), (other_code, other_stdout, other_stderr) = map(ended, ranks)

    assert (1, 1, "") == (code, other_code, other_stdout)
    assert re.search(r"^problem    the self test with gloo failed: .*(Timed out|not finished)", stdout, re.MULTILINE)
    assert "; rank 0 at: all-reduce of 256 KB; rank 1 at: all-reduce of 16 KB. Remedy: " in stdout
    assert re.search(r"^ +16 KB .*GB/s$", stdout, re.MULTILINE)
    assert re.search(r"^parwrap.doctor: rank 1 on \S+, at: all-reduce of 16 KB: not finished after 6 s$", other_stderr, re.MULTILINE)


def test_a_hang_of_forked_ranks_ends_in_time(doctor):
    code, stdout, _ = ended(doctor("-c", STUCK, "4"))

    assert 1 == code
    assert re.search(r"^problem    the self test with gloo failed: .*rank 1 at: all-reduce of 16 KB. Remedy: ", stdout, re.MULTILINE)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_never_comes(doctor, as_rank, rank):
    variables = as_rank(rank)
    code, *printed = ended(doctor("-m", "parwrap.doctor", "--timeout", "2", **variables))

    assert 1 == code
    assert f"rank {rank}" in printed[rank]
    assert f"at: waiting for all ranks to meet at 127.0.0.1:{variables['MASTER_PORT']}" in printed[rank]
    assert "Remedy: check that all ranks were started, and that each machine can reach" in printed[0] or rank == 1
    assert "frame #" not in printed[1]


def test_a_process_that_hangs_in_a_driver_is_not_waited_for_at_the_end(monkeypatch):
    """Made up: no signal ends such a process, and the interpreter would wait for it."""
    monkeypatch.setattr(doctor_command, "refuse_unforkable", lambda who: None)
    monkeypatch.setattr(ForkedExam, "run", lambda exam: None)
    left = []
    monkeypatch.setattr(doctor_command, "_leave", left.append)

    monkeypatch.setattr(doctor_command, "active_children", list)
    status = examine(60, None, as_json=False)
    assert [] == left
    monkeypatch.setattr(doctor_command, "active_children", lambda: ["a process"])
    examine(60, None, as_json=False)
    assert [status] == left


def test_a_file_system_of_shared_memory_that_cannot_be_written_to_is_no_exception(monkeypatch):
    def refused(*args, **options):
        raise OSError("Read-only file system")

    monkeypatch.setattr(multiprocessing.heap.BufferWrapper, "_heap", multiprocessing.heap.Heap())
    monkeypatch.setattr("tempfile.mkstemp", refused)
    exam = ForkedExam(gather({}), 60, "gloo")

    assert {0: "starting the process group", 1: "starting the process group"} == exam.stages()


OTHER = """
import runpy, torch
torch.distributed.Backend.register_backend("other", lambda *_: None, devices=["cpu"])
runpy.run_module("parwrap.doctor", run_name="__main__")
"""
"""A doctor where there is a backend of that name."""


def test_ranks_that_would_wait_for_each_other_for_ever_are_not_started(doctor, as_rank):
    ranks = [doctor("-c", OTHER, "--backend", backend, **as_rank(rank)) for rank, backend in enumerate(["gloo", "other"])]
    (code, stdout, _), (other_code, *_) = map(ended, ranks)

    assert (1, 0) == (code, other_code)
    assert "\nself test  not run: ranks would use different backends" in stdout
    assert "ranks have different backends: gloo on rank 0; other on rank 1. Remedy: pass `--backend gloo`" in stdout


def test_without_torch_it_cannot_be_run(doctor):
    program = "import sys, runpy; sys.modules['torch'] = None; runpy.run_module('parwrap.doctor', run_name='__main__')"
    code, stdout, stderr = ended(doctor("-c", program))

    assert (2, "") == (code, stdout)
    assert "install parwrap, with torch, into the environment of" in stderr


@pytest.mark.parametrize("backend", ["mpi", "foo"])
def test_a_backend_that_is_not_here_is_refused_with_the_sentence_of_parwrap_run(backend, capsys, monkeypatch):
    assert 2 == run.main(["--backend", backend, __file__])
    sentence = capsys.readouterr().err.removeprefix("parwrap.run: ").replace(" Your script's own options go after its name.", "")

    assert f"backend='{backend}' is not available in this build of torch, which has gloo" in sentence
    monkeypatch.setattr("parwrap.doctor.command.gather", None)  # it comes to nothing
    assert 2 == examine(60, backend, as_json=False)
    assert f"parwrap.doctor: {sentence}" == capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "x"])
def test_a_timeout_that_is_none(monkeypatch, capsys, seconds):
    monkeypatch.setattr(sys, "argv", ["doctor", f"--timeout={seconds}"])
    with pytest.raises(SystemExit) as left:
        command.main()

    assert 2 == left.value.code
    assert "--timeout" in capsys.readouterr().err


def test_every_key_of_the_json_is_documented():
    documented = set(re.findall(r"``(\w+)``", (ROOT / "docs" / "launching.rst").read_text().partition("What runs here: the doctor")[2]))
    keys = {*paths(Examination), *(field.name for field in fields(Finding)), "findings", "exit_code"}

    assert {"host", "quota", "algorithm_bandwidth"} <= keys
    assert set() == keys - documented
