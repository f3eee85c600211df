"""Ranks of a plain script that come apart end the job within seconds, with the places of both ranks (contract, rule 10)."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from launched import WITHIN, assert_no_process_left, left_in
from parwrap.checks import watchdog

TRAINING = """
import time, parwrap, torch
from torch.utils.data import DataLoader, TensorDataset
rank = parwrap.rank()
data = TensorDataset(torch.randn(48, 3), torch.randn(48, 1))
model, other = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
optimizer, others_optimizer = (torch.optim.SGD(each.parameters(), 0.1) for each in (model, other))
loader = DataLoader(data, 4, shuffle=True)
def loss_of(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()
try:
    for epoch in range(epochs):
        for step, batch in enumerate(loader):
            optimizer.zero_grad()
            if rank == 1 and step == 3:
                odd
            loss_of(model, batch).backward()  # the step
            optimizer.step()
        if epoch == 0:
            print("up", flush=True)
    print("trained")
finally:
    with parwrap.every_rank_writes():
        open(f"finally-{rank}", "w").close()
"""

ENDS_WITHIN = 30.0
"""Seconds, far above what it takes on a busy machine and far below the timeout of the group."""

STEP = 1 + TRAINING[: TRAINING.index("  # the step")].count("\n")
"""The line of the step. The line before it takes rank 1 apart."""


def train(script, odd: str, epochs: int = 2) -> str:
    """Write the training; rank 1 runs the statement ``odd`` in its fourth step."""
    return script(TRAINING.replace("epochs", str(epochs), 1).replace("odd", odd))


def finals(folder: Path) -> list[str]:
    """The ranks whose ``finally`` block has run."""
    return sorted(path.name for path in folder.glob("finally-*"))


STOPS, SKIPS, RAISES = "break", "continue", "raise ValueError('unhappy')"
TRAINS_ANOTHER = "loss_of(other, batch).backward(); others_optimizer.step(); continue"
EVALUATES = "for each in loader: loss_of(model, each)"


@pytest.mark.parametrize(
    ("odd", "epochs", "said"),
    [
        (STOPS, 1, "If a rank decides by itself to stop or to skip, decide together: `if parwrap.any_rank(stop): break`."),
        pytest.param(STOPS, 2, "`if parwrap.any_rank(stop): break`.", marks=pytest.mark.slow),
        (TRAINS_ANOTHER, 2, "before the backward: `if parwrap.any_rank(skip): continue`. If the decision is random, "),
        pytest.param(EVALUATES, 2, "`if parwrap.any_rank(", marks=pytest.mark.slow),
    ],
    ids=["it stops", "it stops an epoch", "it trains another model", "it evaluates by itself in train mode"],
)
def test_ranks_that_come_apart_end_with_both_places_and_the_remedy(tmp_path, parwrap_run, script, odd, epochs, said):
    path = train(script, odd, epochs)
    began = time.monotonic()
    status, stdout, stderr = parwrap_run("--nproc-per-node", "2", path)

    assert time.monotonic() - began < ENDS_WITHIN
    assert 1 == status
    assert "trained" not in stdout
    for rank in (0, 1):
        assert re.search(rf"^  rank {rank} .* train\.py:\d+ \(backwards begun: \d+\)(, and has stopped there)?$", stderr, re.MULTILINE), (
            stderr
        )
    assert f"train.py:{STEP} " in stderr
    assert said in stderr
    assert ["finally-0", "finally-1"] == finals(tmp_path)


@pytest.mark.slow
def test_a_rank_that_skips_a_batch_is_told_how_many_each_has_drawn(parwrap_run, script):
    status, _, stderr = parwrap_run("--nproc-per-node", "2", train(script, SKIPS))

    assert 1 == status
    assert re.search(r"in backward 4 of its pass, rank \d has drawn [45] batches, the other rank [45]\.", stderr), stderr
    assert "`if parwrap.any_rank(bad): continue`" in stderr


NORMALIZES = """
import parwrap, torch
norms = [torch.nn.BatchNorm1d(2) for _ in range(3)]
for step in range(3):
    x = torch.randn(4, 2)
    for number, norm in enumerate(norms):
        if step < 2 or number != 1 + parwrap.rank():
            x = norm(x)
"""


@pytest.mark.slow
def test_ranks_in_different_batch_norms_end_with_both_places(parwrap_run, script):
    status, _, stderr = parwrap_run("--nproc-per-node", "2", "--sync-bn", script(NORMALIZES))

    assert 1 == status
    assert "rank 0 is in batch norm 3 of 2 channels at train.py:8" in stderr
    assert "rank 1 is in batch norm 2 of 2 channels at train.py:8" in stderr


LEAVES_A_NORM_OUT = """
import parwrap, torch
first, norm, last = torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1)
parameters = [*first.parameters(), *norm.parameters(), *last.parameters()]
optimizer = torch.optim.SGD(parameters, 0.1)
for step in range(4):
    x = first(torch.randn(4, 2))
    normed = norm(x)
    last(normed if step < 3 or parwrap.rank() else x).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_a_loss_that_leaves_out_a_batch_norm_on_one_rank_ends_with_both_places(parwrap_run, script):
    """The other rank waits inside of its backward for a message that never comes."""
    began = time.monotonic()
    status, _, stderr = parwrap_run("--nproc-per-node", "2", "--sync-bn", script(LEAVES_A_NORM_OUT))

    assert time.monotonic() - began < ENDS_WITHIN
    assert 1 == status
    assert "rank 0 waits for the gradients of the backward at train.py:9 (backwards begun: 4)" in stderr
    assert "rank 1 is in the gradient of batch norm 1 in the backward at train.py:9 (backwards begun: 4)" in stderr


def test_a_rank_that_raises_is_named_with_the_place_where_the_other_waits(tmp_path, parwrap_run, script):
    path = train(script, RAISES)
    began = time.monotonic()
    status, _, stderr = parwrap_run("--nproc-per-node", "2", path)

    assert time.monotonic() - began < ENDS_WITHIN
    assert 1 == status
    # whichever rank 0 sees first: the page of the rank that has raised, or its closed connection
    assert f"rank 0 of 2 failed later at train.py:{STEP}: LockstepError: the ranks have come apart" in stderr
    assert f'train.py", line {STEP - 1}, in <module>\n' in stderr
    assert stderr.endswith("ValueError: unhappy\n")
    assert ["finally-0", "finally-1"] == finals(tmp_path)


def test_a_rank_that_dies_while_its_data_is_sent_is_named_with_the_place_where_the_other_waits(tmp_path, parwrap_run, script):
    """Both ranks have met in the collective before rank 1 is killed by what it pickles."""
    dies = "import os, signal; Dies = type('Dies', (), {'__reduce__': lambda self: os.kill(os.getpid(), signal.SIGKILL)})"
    path = train(script, f"{dies}; parwrap.gather(Dies())\n            elif step == 3: parwrap.gather(0)")
    status, _, stderr = parwrap_run("--nproc-per-node", "2", path)

    assert 137 == status
    assert f"rank 0 of 2 failed later at train.py:{STEP}: LockstepError: the ranks have come apart, because the connection" in stderr
    assert "rank 1 of 2 was killed by SIGKILL" in stderr
    assert ["finally-0"] == finals(tmp_path)


@pytest.mark.slow
def test_a_rank_that_is_late_is_waited_for(tmp_path, parwrap_run, script):
    """It sleeps longer than a rank that has ended waits for one that is blocked."""
    late = f"time.sleep({watchdog.PATIENCE + 3 * watchdog.INTERVAL})"
    status, stdout, stderr = parwrap_run("--nproc-per-node", "2", train(script, late, epochs=1))

    assert (0, "up\ntrained\n") == (status, stdout)
    assert 2 == stderr.count("\n"), stderr  # says what the first pass read, and how it went
    assert ["finally-0", "finally-1"] == finals(tmp_path)


@pytest.mark.parametrize(
    ("number", "to_all", "status"),
    [
        (signal.SIGINT, True, 130),
        pytest.param(signal.SIGTERM, False, 143, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, False, 130, marks=pytest.mark.slow),
    ],
    ids=["Ctrl-C", "SIGTERM", "SIGINT to the command"],
)
def test_a_signal_ends_a_job_that_trains(tmp_path, started, environ, script, number, to_all, status):
    process = started("-m", "parwrap.run", "--nproc-per-node", "2", train(script, "pass", epochs=10**6))
    assert "up\n" == process.stdout.readline()
    began = time.monotonic()
    (os.killpg if to_all else os.kill)(process.pid, number)
    _, stderr = process.communicate(timeout=WITHIN)
    took = time.monotonic() - began
    assert_no_process_left(process.pid)

    assert status == process.returncode
    assert ["finally-0", "finally-1"] == finals(tmp_path)
    assert took < 10
    said = re.sub(r"parwrap: .* read .* samples on each of 2 ranks.*\n", "", stderr)
    assert said.startswith("rank 0 of 2 was interrupted:\nTraceback ") if number == signal.SIGINT else said == "", said
    assert said.count("Traceback") <= 1
    assert "/parwrap/" not in said.replace(str(tmp_path), "")
    assert [] == left_in(environ)
