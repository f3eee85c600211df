"""``benchmarks/on_gpu.py --minutes 8``, as far as it runs without a GPU."""

from __future__ import annotations

import sys

import on_gpu
import pytest
from eight import EXPERIMENTS


def run(monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", ["on_gpu.py", *options])
    on_gpu.main()


@pytest.mark.parametrize("options", [(), ("--minutes", "8"), ("--cpu",)])
def test_without_a_gpu_nothing_is_measured(monkeypatch, capsys, options):
    monkeypatch.setattr(on_gpu.torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, *options)

    assert (2, True) == (ended.value.code, "torch sees no GPU here" in capsys.readouterr().err)


def test_each_experiment_has_a_row(monkeypatch, capsys):
    asked = []

    def ran(name, device, seconds):
        asked.append((name, device))
        return {"seconds": 1}, "as wanted"

    monkeypatch.setattr(on_gpu, "run_experiment", ran)
    run(monkeypatch, "--minutes", "8", "--cpu")
    rows = capsys.readouterr().out.splitlines()[1:]

    assert [*EXPERIMENTS] == [row[:32].rstrip() for row in rows]
    assert [(name, "cpu") for name, each in EXPERIMENTS.items() if each.on_cpu] == asked
    assert all("needs a GPU" in row for row in rows if not EXPERIMENTS[row[:32].rstrip()].on_cpu)


def test_an_experiment_runs_on_two_ranks_of_a_cpu():
    numbers, said = on_gpu.run_experiment("checkpoints after a failure", "cpu", 100)

    assert ("as wanted", True, True) == (said, numbers["raised"], numbers["a is kept"])


def test_an_experiment_that_takes_too_long_has_a_row_too():
    assert ({}, "NOT DONE in 0 s") == on_gpu.run_experiment("a failure in the first forward", "cpu", 0.01)
