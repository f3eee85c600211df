"""The functions of parwrap that a steady step enters: ``python benchmarks/steady.py`` counts files, functions and calls of each part.

A plain loop runs on two ranks, and rank 0 counts in nine steps of its first pass. Of each part it shows the step with the fewest calls:
where the other rank is ahead, a rank looks twice. ``--list`` names every call in its order. How long a step takes: ``overhead.py``.
"""

from __future__ import annotations

import subprocess
import sys
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEADY = range(50, 59)
"""The steps that are counted: by then the set of parameters is known, and no check of the first steps runs."""

PACKAGE = "parwrap/"


def train(listed: bool) -> None:
    """Train on one pass and print what step ``STEADY`` has called."""
    model = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = iter(DataLoader(TensorDataset(torch.randn(3200, 10), torch.randint(10, (3200,))), batch_size=16, shuffle=True))
    fewest: dict[str, list[tuple[str, str]]] = {}
    calls: dict[str, list[tuple[str, str]]] = {}
    part = ""

    def count(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and PACKAGE in code.co_filename:
            calls.setdefault(part, []).append((code.co_filename.rpartition(PACKAGE)[2], getattr(code, "co_qualname", code.co_name)))

    for step in range(STEADY.stop):
        calls = {}
        sys.setprofile(count if step in STEADY else None)
        part = "batch"
        x, y = next(batches)
        part = "zero_grad"
        optimizer.zero_grad()
        part = "loss"
        loss = nn.functional.cross_entropy(model(x), y)
        part = "backward"
        loss.backward()
        part = "step"
        optimizer.step()
        sys.setprofile(None)
        fewest |= {each: found for each, found in calls.items() if each not in fewest or len(found) < len(fewest[each])}
    print(f"{'':10}{'files':>8}{'functions':>12}{'calls':>8}")
    for each, found in fewest.items():
        print(f"{each:10}{len({file for file, _ in found}):8}{len({*found}):12}{len(found):8}")
    for each, found in fewest.items() if listed else ():
        for call in found:
            print("  ", each, *call)


if __name__ == "__main__":
    if "--on-ranks" in sys.argv:
        train("--list" in sys.argv)
    else:
        command = [sys.executable, "-m", "parwrap", "run", "--nproc-per-node", "2", "--quiet", __file__, "--on-ranks", *sys.argv[1:]]
        sys.exit(subprocess.run(command, check=False).returncode)
