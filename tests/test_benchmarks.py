"""The benchmark itself: it measures what it says and judges by its rule. No timing is asserted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def judged(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from timing import judged

    return lambda samples, limit: judged("case", "a / b", "ms", reference=[1.0], measured=[1.0], samples=samples, limit=limit)


@pytest.mark.slow
def test_step_times_are_written_as_json(tmp_path):
    results = tmp_path / "overhead.json"
    results.write_text('{"import": "of another run"}')
    command = [sys.executable, ROOT / "benchmarks" / "overhead.py", "--only=steps", "--cases=tiny", "--pairs=2", f"--json={results}"]
    run = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr

    written = json.loads(results.read_text())
    parwrap, itself = written["steps"]["rows"]
    assert (parwrap["case"], parwrap["compared"], parwrap["unit"]) == ("tiny", "parwrap / by hand", "ms")
    assert parwrap["limit"] == 1.05
    assert isinstance(parwrap["met"], bool)
    assert len(parwrap["samples"]) == 2
    assert 0 < parwrap["low"] <= parwrap["value"] <= parwrap["high"]
    assert (itself["compared"], itself["limit"], itself["met"]) == ("by hand again / by hand", None, None)
    assert written["import"] == "of another run"
    assert len(run.stdout.splitlines()) == 3


def test_the_benchmark_for_gpus_says_so_where_there_is_none():
    command = [sys.executable, ROOT / "benchmarks" / "amp_gpu.py", "--pairs=2", "--steps=2"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    printed = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=True).stdout

    assert "torch cannot use a GPU here: nothing is measured.\n" == printed


@pytest.mark.slow
def test_what_features_cost_is_written_as_json(tmp_path):
    results = tmp_path / "features.json"
    results.write_text('{"another": "of another run"}')
    command = [sys.executable, ROOT / "benchmarks" / "features.py", "--only=accumulate", "--pairs=2", f"--json={results}"]
    run = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr

    written = json.loads(results.read_text())
    saved, itself = written["accumulate"]["rows"]
    assert (saved["case"], saved["compared"], saved["limit"]) == ("wide", "accumulate / sending each batch", 0.8)
    assert (itself["compared"], itself["limit"]) == ("sending each batch again / sending each batch", None)
    assert written["another"] == "of another run"


@pytest.mark.slow
def test_how_much_faster_hogwild_is_is_written_as_json(tmp_path):
    results = tmp_path / "hogwild.json"
    command = [sys.executable, ROOT / "benchmarks" / "hogwild.py", "--pairs=2", "--seconds=0.1", "--ways=ddp by hand", f"--json={results}"]
    run = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr

    faster, _, ahead = json.loads(results.read_text())["rows"]
    assert ("batch 1", "hogwild / one worker", 1 / 1.7) == (faster["case"], faster["compared"], faster["limit"])
    assert ("hogwild / ddp by hand", 1.0) == (ahead["compared"], ahead["limit"])


def test_a_launch_is_timed_and_its_memory_taken(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from launch import launchers

    launched = launchers(ranks=2)["parwrap.run"]()

    assert 0 < launched.seconds < 100
    assert 150 < launched.memory < 2000  # torch alone takes more than the former


@pytest.mark.parametrize(
    ("samples", "met"),
    [
        ([1.00, 1.01, 1.02, 1.30, 1.30], True),
        ([1.01, 1.02, 1.03, 1.04, 1.05], True),
        ([0.90, 1.00, 1.03, 1.20, 1.30], False),
        ([1.03, 1.04, 1.05, 1.06, 1.07], False),
    ],
    ids=["median within", "interval contains it", "interval too wide", "interval above"],
)
def test_a_limit_is_met_by_the_median_or_by_a_narrow_interval_around_it(judged, samples, met):
    assert judged(samples, limit=1.02).met == met


def test_the_time_to_an_accuracy_lies_between_two_evaluations(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from uniform_length import TARGET, Run, draw

    run = Run(seconds=[1.0, 3.0], accuracies=[TARGET - 0.1, TARGET + 0.3], padding=0.01)
    at_once = Run(seconds=[2.0], accuracies=[2 * TARGET], padding=0.01)

    assert (1.5, 1.0) == (pytest.approx(run.to_target), at_once.to_target)
    draw({"1 rank(s)": {"padded to the longest": [run], "uniform_length": [at_once]}}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


@pytest.mark.slow
def test_strategies_are_compared_in_one_table(tmp_path):
    results = tmp_path / "strategies.json"
    command = [sys.executable, ROOT / "benchmarks" / "strategies.py", "--repeats=1", "--only", "1 process", "ddp", f"--json={results}"]
    command += ["--samples=256", "--epochs=2"]
    run = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr

    alone, ddp = json.loads(results.read_text())["rows"]
    assert ["1 process", "ddp"] == [alone["way"], ddp["way"]]
    assert ddp["MB sent"] > 17.9  # 4.5 million numbers of 4 bytes, by each of two ranks
    assert min(ddp["samples/s"], ddp["MiB peak"], ddp["loss"]) > 0
