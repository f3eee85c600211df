"""What stands at the bottom of the screen after a failure: what went wrong first, and where."""

import pytest

TRAINS = """
import os, signal, sys, time
import torch
import parwrap
bad = parwrap.rank() == parwrap.world_size() - 1
if sys.argv[1] == "before" and bad:
    raise ValueError("before training")
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(48, 2))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
for epoch in range(2):
    model.train()
    for number, (x,) in enumerate(loader):
        if bad and epoch == 1 and number == 1:
            if sys.argv[1] == "training":
                raise ValueError("in training")
            if sys.argv[1] == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if sys.argv[1] == "sleeps":
                time.sleep(1000)  # here
            if sys.argv[1] == "backward":
                model.weight.register_hook(lambda gradient: time.sleep(1000))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        for number, (x,) in enumerate(torch.utils.data.DataLoader(data, batch_size=4)):
            model(x)
            if sys.argv[1] == "evaluation" and bad and number == 1:
                raise ValueError("in evaluation")
"""


@pytest.mark.parametrize("ranks", ["2", "4"])
@pytest.mark.parametrize(
    ("when", "last"),
    [
        ("before", "ValueError: before training"),
        ("training", "ValueError: in training"),
        ("evaluation", "ValueError: in evaluation"),
        ("killed", "rank {bad} of {ranks} was killed by SIGKILL (out of memory?)"),
    ],
)
def test_the_rank_that_failed_first_has_the_last_word(when, last, ranks, parwrap_run, script):
    status, _, stderr = parwrap_run("--nproc-per-node", ranks, script(TRAINS), when)
    bad = int(ranks) - 1

    assert status == (137 if when == "killed" else 1)
    assert last.format(bad=bad, ranks=ranks) == stderr.splitlines()[-1], stderr
    if when != "killed":
        assert f"rank {bad} of {ranks} failed:" in stderr.splitlines()


@pytest.mark.parametrize("ranks", ["2", pytest.param("3", marks=pytest.mark.slow)])
def test_after_the_timeout_the_line_of_the_missing_rank_is_named(ranks, parwrap_run, script):
    status, _, stderr = parwrap_run("--nproc-per-node", ranks, "--timeout", "4", script(TRAINS), "sleeps")
    line = TRAINS.splitlines().index("                time.sleep(1000)  # here") + 1

    assert status == 1
    assert f"Rank {int(ranks) - 1} has left backward" in stderr.splitlines()[-1], stderr
    assert f"train.py:{line}. A missing rank" in stderr.splitlines()[-1], stderr


@pytest.mark.parametrize("ranks", ["2", pytest.param("3", marks=pytest.mark.slow)])
def test_after_the_timeout_of_a_backward_its_line_is_named(ranks, parwrap_run, script):
    status, _, stderr = parwrap_run("--nproc-per-node", ranks, "--timeout", "4", script(TRAINS), "backward")
    line = TRAINS.splitlines().index("        model(x).square().mean().backward()") + 1
    last = stderr.splitlines()[-1]

    assert status == 1
    assert "timed out after waiting 4 s for the other ranks to reach the same point (the average of the gradients)." in last, stderr
    assert f"Rank {int(ranks) - 1} has been in backward" in last
    assert f"train.py:{line}) for 4 s." in last
