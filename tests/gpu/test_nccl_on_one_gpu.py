"""Two ranks that share one GPU over NCCL, beside hand-written DDP; with ``PARWRAP_TEST_DEVICE=cpu`` the same over gloo, to try this test.

NCCL refuses two ranks on one GPU of a host. Each rank says that it is a host of its own, and they meet over sockets.
"""

import json
import os
import socket

import pytest
import torch

from test_on_a_gpu import DEVICE

pytestmark = pytest.mark.skipif(DEVICE == "cuda" and torch.cuda.device_count() == 0, reason="torch sees no GPU here")

BESIDE_DDP = """
import contextlib, json, sys, warnings
import torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
import parwrap

DEVICE, BACKEND, OPENED, NAME, OPTIONS = *sys.argv[1:5], json.loads(sys.argv[5])
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
RANK = int(__import__("os").environ["RANK"])
torch.backends.cudnn.deterministic = True

def build():
    torch.manual_seed(0)
    norms = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
    return nn.Sequential(*norms, nn.Flatten(), nn.Linear(128, 4)).to(DEVICE)

def batches():
    generator = torch.Generator().manual_seed(RANK)
    for _ in range(16):
        yield torch.randn(8, 3, 8, 8, generator=generator).to(DEVICE), torch.randint(4, (8,), generator=generator).to(DEVICE)

def by_hand():
    plain = build()
    if NAME == "sync_bn":
        plain = nn.SyncBatchNorm.convert_sync_batchnorm(plain)
    model = DistributedDataParallel(plain, device_ids=[0] if DEVICE == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler(DEVICE, enabled=NAME == "fp16")
    for number, (x, y) in enumerate(batches()):
        inside = NAME == "accumulate" and number % 4 < 3
        with model.no_sync() if inside else contextlib.nullcontext():
            with torch.autocast(DEVICE, dtype=DTYPES.get(NAME), enabled=NAME in DTYPES):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss / 4 if NAME == "accumulate" else loss).backward()
        if not inside:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return plain

def train():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for x, y in batches():
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model

FEATURES = {name: parwrap.amp(dtype=name) for name in DTYPES} | {"accumulate": parwrap.accumulate(4), "sync_bn": parwrap.sync_bn}

dist.init_process_group(BACKEND, init_method="file://" + OPENED, rank=RANK, world_size=2)
expected = by_hand()
dist.barrier()
dist.destroy_process_group()
actual = parwrap.distributed(backend=BACKEND, **OPTIONS)(FEATURES.get(NAME, lambda function: function)(train))()
if RANK == 0:
    far = max((a - b).abs().max().item() for a, b in zip(expected.parameters(), actual.parameters(), strict=True))
    print(json.dumps({"largest difference": far, "finite": all(p.isfinite().all().item() for p in actual.parameters())}))
"""


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("plain", {}),
        ("bf16", {}),
        ("fp16", {}),
        ("accumulate", {}),
        ("sync_bn", {}),
        ("zero1", {"strategy": "zero1"}),
        ("fsdp", {"strategy": "fsdp"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_weights_are_bit_for_bit_those_of_ddp_by_hand(name, options, tmp_path, started, environ):
    if DEVICE == "cpu" and name in ("fp16", "sync_bn"):
        pytest.skip("torch's own is for GPUs")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "beside_ddp.py").write_text(BESIDE_DDP)
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    command = [str(tmp_path / "beside_ddp.py"), DEVICE, backend, str(tmp_path / "opened"), name, json.dumps(options)]
    ranks = []
    for rank in range(2):
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        nccl = {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1"}
        # the variables of parwrap come first, so that no rank hides GPUs from itself
        ours = {f"PARWRAP_{key}": value for key, value in place.items() if key != "MASTER_ADDR"}
        ranks.append(started(*command, env={**environ, **place, **ours, **nccl, "MASTER_PORT": str(port), "TMPDIR": os.fspath(tmp_path)}))
    ends = [rank.communicate(timeout=120) for rank in ranks]

    assert [0, 0] == [rank.returncode for rank in ranks], ends
    assert {"largest difference": 0.0, "finite": True} == json.loads(ends[0][0].splitlines()[-1])
