"""Two nodes of one rank each train as one node of two ranks does, and end together. A node is a network namespace."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import parwrap
from scale import address, network

ROOT = Path(parwrap.__file__).parents[1]
WITHIN = 60
"""Seconds, far above what a run takes on a busy machine."""

TRAINING = """
import parwrap, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
data = TensorDataset(torch.randn(48, 6), torch.randint(3, (48,)))
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.AdamW(model.parameters(), 0.05)
for epoch in range(2):
    for step, (x, y) in enumerate(DataLoader(data, 4, shuffle=True)):
        if STOPS and parwrap.rank() == 1 and epoch and step == 3:
            break
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
torch.save([loss.item(), model.state_dict()], "trained.pt")
"""
BACKWARD = 1 + TRAINING[: TRAINING.index("loss.backward()")].count("\n")


@pytest.fixture
def nodes():
    """The namespaces of two nodes."""
    try:
        entered = network(2)
        names = entered.__enter__()
    except OSError as error:
        pytest.skip(f"no network namespaces here: {error}")
    yield names
    entered.__exit__(None, None, None)


@contextmanager
def running(folder: Path, *commands: tuple[str, ...]) -> Iterator[list[subprocess.Popen]]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def trained(folder: Path, stops: bool, *commands: tuple[str, ...]) -> list[tuple[int, str]]:
    """Exit code and stderr of each of the ``commands``, which run the training in ``folder``."""
    folder.mkdir()
    (folder / "train.py").write_text(TRAINING.replace("STOPS", str(stops)))
    with running(folder, *commands) as processes:
        return [(process.wait(WITHIN), process.communicate()[1]) for process in processes]


def run(*options: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "parwrap.run", *options, "train.py")


def on_two(names: list[str]) -> list[tuple[str, ...]]:
    """The commands that start a rank on each of two nodes."""
    options = ("--nproc-per-node", "1", "--nnodes", "2", "--master-addr", address(0))
    return [("ip", "netns", "exec", name, *run(*options, "--node-rank", str(node))) for node, name in enumerate(names)]


def test_two_nodes_leave_bit_for_bit_the_weights_of_one(tmp_path, nodes):
    [(status, said)] = trained(tmp_path / "one", False, run("--nproc-per-node", "2"))
    ended = trained(tmp_path / "two", False, *on_two(nodes))
    (loss, expected), (others_loss, actual) = (torch.load(tmp_path / name / "trained.pt") for name in ("one", "two"))

    assert (0, [0, 0]) == (status, [status for status, _ in ended]), (said, ended)
    assert loss == others_loss
    assert [] == [name for name, value in expected.items() if not torch.equal(value, actual[name])]


def test_a_rank_that_stops_early_ends_both_nodes(tmp_path, nodes):
    began = time.monotonic()
    ended = trained(tmp_path / "two", True, *on_two(nodes))

    assert time.monotonic() - began < WITHIN / 2
    assert [1, 1] == [status for status, _ in ended], ended
    for _, said in ended:
        assert f"rank 0 is in the backward at train.py:{BACKWARD} (backward 10)" in said.replace(str(tmp_path / "two") + "/", ""), said
        assert said.endswith("decide together: `if parwrap.any_rank(stop): break`.\n"), said
    assert not (tmp_path / "two" / "trained.pt").exists()
