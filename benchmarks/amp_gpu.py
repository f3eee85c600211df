"""Step time of ``parwrap.amp`` against autocast and GradScaler by hand, on a GPU; where there is none, it says so.

python benchmarks/amp_gpu.py [--pairs 30] [--steps 20] [--json results.json]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from timing import alternated, compared
from torch import nn

import parwrap

LIMIT = 1.02
"""The largest ratio that is wanted."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def resnet_like() -> tuple[nn.Module, torch.Tensor]:
    layers: list[nn.Module] = [nn.Conv2d(3, 128, 3, padding=1)]
    for _ in range(16):
        layers += [nn.Conv2d(128, 128, 3, padding=1, bias=False), nn.BatchNorm2d(128), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)), torch.randn(128, 3, 32, 32)


def transformer() -> tuple[nn.Module, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 6), nn.Flatten(), nn.Linear(512 * 128, 10)), torch.randn(32, 128, 512)


CASES = {"small ResNet": resnet_like, "small transformer": transformer}


def seconds_by_hand(case: str, dtype: str, steps: int) -> float:
    """Of one step, written by hand."""
    model, optimizer, x, y = _built(case)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == "fp16")

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=DTYPES[dtype]):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return _timed(step, steps)


def seconds_by_parwrap(case: str, dtype: str, steps: int) -> float:
    """Of one step of the plain loop."""
    with parwrap.amp(dtype=dtype, device="cuda"):
        model, optimizer, x, y = _built(case)

        def step() -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

        return _timed(step, steps)


def _built(case: str) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model, x = CASES[case]()
    model = model.cuda()
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), x.cuda(), torch.randint(10, (len(x),), device="cuda")


def _timed(step: Callable[[], None], steps: int) -> float:
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30, help="how often each is measured")
    parser.add_argument("--steps", type=int, default=20, help="steps in one measurement")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("torch cannot use a GPU here: nothing is measured.")
        return
    rows = []
    for case in CASES:
        for dtype in DTYPES:
            measures = {
                "by hand": partial(seconds_by_hand, case, dtype, arguments.steps),
                "parwrap": partial(seconds_by_parwrap, case, dtype, arguments.steps),
                "by hand again": partial(seconds_by_hand, case, dtype, arguments.steps),
            }
            rows += compared(f"{case}, {dtype}", "s", alternated(measures, arguments.pairs), "by hand", {"parwrap": LIMIT})
    for row in rows:
        print(f"{row.case:<26} {row.compared:<24} {row.value:.3f} ({row.low:.3f} to {row.high:.3f}) {'' if row.met is None else row.met}")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
