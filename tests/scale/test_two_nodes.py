"""Two nodes of one rank each train as one node of two ranks does, and end together. A node is a network namespace."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import parwrap
from scale import address, network

ROOT = Path(parwrap.__file__).parents[1]
ENDS_WITHIN = 30.0
"""Seconds, far above what a run takes on a busy machine and far below the timeout of the group."""

TRAINING = """
import parwrap, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
data = TensorDataset(torch.randn(48, 6), torch.randint(3, (48,)))
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 3))
other = nn.Sequential(nn.Linear(6, 50), nn.Linear(50, 3))
optimizer, others_optimizer = torch.optim.AdamW(model.parameters(), 0.05), torch.optim.SGD(other.parameters(), 0.05)
loader = DataLoader(data, 4, shuffle=True)
def loss_of(model, x, y):
    return nn.functional.cross_entropy(model(x), y)
for epoch in range(2):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        others_optimizer.zero_grad()
        if epoch == 1 and step == ODD_STEP and parwrap.rank() == 1:
            odd
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        loss_of(other, x, y).backward()
        others_optimizer.step()
torch.save([loss.item(), model.state_dict(), other.state_dict()], "trained.pt")
"""


@pytest.fixture
def nodes() -> Iterator[list[str]]:
    """The namespaces of two nodes."""
    entered = network(2)
    try:
        names = entered.__enter__()
    except OSError as error:
        pytest.skip(f"no network namespaces here: {error}")
    yield names
    entered.__exit__(None, None, None)


def trained(folder: Path, odd: str, step: int, *commands: tuple[str, ...]) -> list[tuple[int, str]]:
    """Run the training in ``folder``, where rank 1 runs the statement ``odd`` in a step of the second epoch.

    Returns:
        Exit code and stderr of each of the ``commands``.
    """
    folder.mkdir()
    (folder / "train.py").write_text(TRAINING.replace("ODD_STEP", str(step)).replace("odd", odd, 1))
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    until = time.monotonic() + ENDS_WITHIN
    processes = [
        subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    try:
        said = [process.communicate(timeout=max(0.0, until - time.monotonic()))[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(process.returncode, text.replace(f"{folder}/", "")) for process, text in zip(processes, said, strict=True)]


def run(*options: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "parwrap.run", *options, "train.py")


def on_two(names: list[str]) -> list[tuple[str, ...]]:
    """The commands that start a rank on each of two nodes."""
    options = ("--nproc-per-node", "1", "--nnodes", "2", "--master-addr", address(0))
    return [("ip", "netns", "exec", name, *run(*options, "--node-rank", str(node))) for node, name in enumerate(names)]


def test_two_nodes_leave_bit_for_bit_the_weights_of_one(tmp_path, nodes):
    one = trained(tmp_path / "one", "pass", 0, run("--nproc-per-node", "2"))
    two = trained(tmp_path / "two", "pass", 0, *on_two(nodes))
    (loss, *expected), (others_loss, *actual) = (torch.load(tmp_path / name / "trained.pt") for name in ("one", "two"))

    assert [0, 0, 0] == [status for status, _ in (*one, *two)], (one, two)
    assert loss == others_loss
    for theirs, ours in zip(expected, actual, strict=True):
        assert [] == [name for name, value in theirs.items() if not torch.equal(value, ours[name])]


TRAINS_ANOTHER = "loss_of(other, x, y).backward(); others_optimizer.step(); continue"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("odd", "step"),
    [
        pytest.param("break", 2, id="it stops after weights were compared"),
        pytest.param("raise SystemExit(0)", 3, id="it exits"),
        pytest.param("parwrap.gather(1)", 3, id="it gathers"),
        pytest.param("continue", 3, id="it skips a batch"),
        pytest.param(TRAINS_ANOTHER, 3, id="it trains another model"),
    ],
)
def test_ranks_that_come_apart_end_both_nodes_with_the_remedy(tmp_path, nodes, odd, step):
    """An early end of the training or of the process, another collective, a batch less, and a collective of another size."""
    ended = trained(tmp_path / "two", odd, step, *on_two(nodes))

    assert 0 not in [status for status, _ in ended], ended
    assert any(re.search(r"rank [01] (is in|waits for) .* at train\.py:\d+ \(backwards begun: \d+\)", said) for _, said in ended), ended
    assert any("decide together: `if parwrap.any_rank(stop): break`." in said for _, said in ended), ended
    assert not (tmp_path / "two" / "trained.pt").exists()


@pytest.mark.slow
def test_a_rank_that_raises_ends_both_nodes_with_its_error(tmp_path, nodes):
    ended = trained(tmp_path / "two", "raise ValueError('unhappy')", 3, *on_two(nodes))

    assert [1, 1] == [status for status, _ in ended], ended
    for _, said in ended:
        assert re.search(r"rank 0 of 2 on node 0 .* failed later at train\.py:\d+: LockstepError: the ranks have come apart", said), said
        assert said.endswith("ValueError: unhappy\n"), said
