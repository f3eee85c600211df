"""What is on disk after a rank has failed in the midst of training on GPUs: by a mock of NCCL, whose results are garbage after an abort."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).parents[1] / "gpu" / "failing_rank.py"
LARGEST = 10.0
"""Far above each weight, and far below what an aborted all-reduce leaves."""
HOWS, WHERES, NUMBERS = ("raises", "is killed", "has no memory"), ("forward", "backward", "step", "save"), (1, 20)
QUICK = {
    ("raises", "forward", 1),
    ("raises", "backward", 20),
    ("is killed", "forward", 20),
    ("is killed", "backward", 1),
    ("has no memory", "backward", 1),
    ("has no memory", "step", 20),
    ("raises", "save", 20),
}
CASES = [(how, where, number) for how in HOWS for where in WHERES for number in NUMBERS]


@pytest.mark.parametrize(("how", "where", "number"), [pytest.param(*c, marks=[] if c in QUICK else pytest.mark.slow) for c in CASES])
def test_a_good_checkpoint_stays_and_the_cause_is_printed(how, where, number, warm_python, environ, tmp_path):
    failing = "0" if where == "save" else "1"  # rank 0 writes
    began = time.monotonic()
    options = ("--nproc-per-node", "2", "--plain", str(PROGRAM), failing, how, where, str(number))
    _, status, _, stderr = warm_python.run("parwrap.run", *options, cwd=tmp_path, environ=environ)

    assert 0 != status
    assert time.monotonic() - began < 20
    assert ("SIGKILL" if how == "is killed" else "the cause") in stderr.splitlines()[-1], stderr
    for path in tmp_path.glob("*.pt"):
        saved = torch.load(path)
        weights = torch.cat([p.flatten() for p in saved.get("model", saved).values()])
        assert weights.abs().max() < LARGEST, (path, weights, stderr)
    if number > 1:
        assert number - 1 <= torch.load(tmp_path / "model.pt")["step"] <= number
