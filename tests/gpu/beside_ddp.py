"""Trains in one way by hand and by parwrap, on two ranks: ``python beside_ddp.py cuda nccl FILE WAY``. test_nccl.py runs it.

Rank 0 prints as JSON by how much the weights differ at most, the largest weight, and the lines at which parwrap has waited for the GPU.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import parwrap

DEVICE, BACKEND, MEETING, WAY = sys.argv[1:] if __name__ == "__main__" else [""] * 4
RANK = int(os.environ.get("RANK", "0"))
COMPILED = {"compile": None, "cuda graphs": "reduce-overhead"}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
STEPS, SETTLED = 44, 36
"""Weights are compared in the 32nd step; after ``SETTLED`` steps nothing is new."""
EACH = 4
"""Batches of one update with ``accumulate``, and steps of one average with ``local_sgd``."""

DECORATORS = {
    **{name: parwrap.amp(dtype=name) for name in DTYPES},
    "accumulate": parwrap.accumulate(EACH),
    "sync_bn": parwrap.sync_bn,
}
OPTIONS = {
    "compress": {"compress": "bf16"},
    "zero1": {"strategy": "zero1"},
    "fsdp": {"strategy": "fsdp"},
    "local_sgd": {"strategy": "local_sgd", "every": EACH},
    "parameter_server": {"strategy": "parameter_server", "staleness": 0},
}


def build() -> nn.Module:
    torch.manual_seed(0)
    torch.backends.cudnn.deterministic = True
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 4)).to(DEVICE)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(RANK)
    return [
        (torch.randn(8, 3, 8, 8, generator=generator).to(DEVICE), torch.randint(4, (8,), generator=generator).to(DEVICE))
        for _ in range(STEPS)
    ]


def by_hand() -> nn.Module:
    if WAY == "local_sgd":
        return _local_sgd_by_hand()
    plain = build()
    if WAY == "sync_bn":
        plain = nn.SyncBatchNorm.convert_sync_batchnorm(plain)
    model = DistributedDataParallel(torch.compile(plain, mode=COMPILED[WAY]) if WAY in COMPILED else plain)
    if WAY == "compress":
        model.register_comm_hook(None, bf16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler(DEVICE, enabled=WAY == "fp16")
    for number, (x, y) in enumerate(batches()):
        between = WAY == "accumulate" and number % EACH < EACH - 1
        with model.no_sync() if between else nullcontext():
            with torch.autocast(DEVICE, dtype=DTYPES.get(WAY), enabled=WAY in DTYPES):
                loss = functional.cross_entropy(model(x), y)
            scaler.scale(loss / EACH if WAY == "accumulate" else loss).backward()
        if not between:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return plain


def _local_sgd_by_hand() -> nn.Module:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for number, (x, y) in enumerate(batches(), 1):
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % EACH == 0:
            for parameter in model.parameters():
                dist.all_reduce(parameter.data)
                parameter.data /= 2
    return model


def train() -> nn.Module:
    """As for one GPU."""
    plain = build()
    model = torch.compile(plain, mode=COMPILED[WAY]) if WAY in COMPILED else plain
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for number, (x, y) in enumerate(batches()):
        if number == SETTLED and DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    if DEVICE == "cuda":
        torch.cuda.set_sync_debug_mode("default")
    return plain


def main() -> None:
    if RANK < 2:  # others are servers
        dist.init_process_group(BACKEND, init_method=f"file://{MEETING}", rank=RANK, world_size=2)
        expected = [p.detach() for p in by_hand().parameters()]
        dist.barrier()
        dist.destroy_process_group()
    scoped = parwrap.distributed(backend=BACKEND, **OPTIONS.get(WAY, {}))(DECORATORS.get(WAY, lambda function: function)(train))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = scoped()
    weights = [p.detach() for p in model.state_dict(keep_vars=True).values() if isinstance(p, nn.Parameter)]
    if RANK == 0:
        print(
            json.dumps(
                {
                    "difference": max(float((one - other).abs().max()) for one, other in zip(expected, weights, strict=True)),
                    "largest": max(float(p.abs().max()) for p in weights),
                    "waits": sorted({f"{each.filename}:{each.lineno}" for each in said if "called a synchronizing" in str(each.message)}),
                }
            )
        )


if __name__ == "__main__":
    main()
