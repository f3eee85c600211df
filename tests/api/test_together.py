"""Decorators together, and as options of ``parwrap.run``, on whole trainings."""

import re
import sys
from pathlib import Path

import pytest

from warm_command import run as run_command

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits.py"

TINY = """
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
digits = load_digits()
images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
loader = DataLoader(TensorDataset(images[:1500], labels[:1500]), batch_size=50, shuffle=True)
model = nn.Sequential(nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
for epoch in range(15):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
with torch.no_grad():
    print("test accuracy", (model(images[1500:]).argmax(1) == labels[1500:]).float().mean().item())
"""


def accuracy(*command):
    done = run_command([sys.executable, *map(str, command)], timeout=100, check=True)
    return float(re.findall(r"^test accuracy (\S+)$", done.stdout, re.MULTILINE)[-1])


@pytest.mark.slow
def test_digits_are_told_as_well_under_all_options_as_in_float32_by_one_process():
    options = ("--nproc-per-node", "2", "--amp", "bf16", "--sync-bn", "--accumulate", "2")

    plain, together = accuracy(EXAMPLE, "--epochs", 12), accuracy("-m", "parwrap.run", *options, EXAMPLE, "--epochs", 12)

    assert plain > 0.95
    assert together > plain - 0.01


@pytest.mark.slow
def test_a_tiny_net_learns_as_well_in_float16_as_in_float32(tmp_path):
    (tmp_path / "tiny.py").write_text(TINY)

    plain, half = accuracy(tmp_path / "tiny.py"), accuracy("-m", "parwrap.run", "--amp", "fp16", tmp_path / "tiny.py")

    assert plain > 0.85
    assert half > plain - 0.01
