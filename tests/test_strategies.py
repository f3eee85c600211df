"""Every strategy trains the plain example as well as a single process does, and a rank that fails ends the job with its error."""

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

STRATEGIES = [
    ["--strategy", "ddp"],
    ["--strategy", "none"],
    ["--strategy", "fsdp"],
]


def run(*command, cwd=ROOT):
    return subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, timeout=100)


@functools.cache
def accuracy(*options):
    printed = run("-m", "parwrap.run", *options, "examples/digits.py", "--epochs", "8")

    assert 0 == printed.returncode, printed.stderr
    return float(re.search(r"^test accuracy (\S+)$", printed.stdout, re.MULTILINE)[1])


@pytest.mark.parametrize("options", STRATEGIES, ids=" ".join)
def test_digits_are_learnt_as_by_a_single_process(options):
    assert accuracy("--nproc-per-node", "2", *options) >= accuracy("--nproc-per-node", "1") - 0.01


FAILS = """
import torch, parwrap
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.ones(64, 1))
for step, (x,) in enumerate(torch.utils.data.DataLoader(data, batch_size=2)):
    if step == 2 and parwrap.rank() == 1:
        raise ValueError("rank 1 has had enough")
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("options", STRATEGIES, ids=" ".join)
def test_a_rank_that_fails_ends_the_job_with_its_error(options, tmp_path):
    (tmp_path / "fails.py").write_text(FAILS)
    printed = run("-m", "parwrap.run", "--nproc-per-node", "3", *options, "fails.py", cwd=tmp_path)

    assert 0 != printed.returncode
    assert "ValueError: rank 1 has had enough" in printed.stderr
