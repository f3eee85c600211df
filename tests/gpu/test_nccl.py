"""Two ranks that share one GPU over NCCL, beside hand-written DDP. ``PARWRAP_TEST_DEVICE=cpu`` runs them over gloo, to try these tests.

NCCL refuses two ranks on one GPU of a host, so each rank is a host of its own: they meet over sockets, as two nodes do.
"""

from __future__ import annotations

import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from on_gpu import as_host

import parwrap
from parwrap.testing.rank_pools import rank_environ
from test_on_a_gpu import DEVICE

BACKEND = {"cuda": "nccl", "cpu": "gloo"}[DEVICE]
ROOT = Path(parwrap.__file__).parents[1]
ENDS_WITHIN = 35.0
"""Seconds, far above what it takes and far below the timeout of the group."""

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


def on_hosts(number: int, folder: Path, *command: str, **environ: str) -> list[tuple[int, str, str]]:
    """How ``python COMMAND`` ends on each of ``number`` hosts, and what it prints; ``RANK`` in it is the rank."""
    ranks = []
    for rank in range(number):
        environment = {
            **rank_environ(),
            "PYTHONPATH": str(ROOT),
            **as_host(rank),
            **{name: value.replace("RANK", str(rank)) for name, value in environ.items()},
        }
        words = [sys.executable, *(word.replace("RANK", str(rank)) for word in command)]
        ranks.append(subprocess.Popen(words, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        ends = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, *printed) for rank, printed in zip(ranks, ends, strict=True)]


def trained(way: str, tmp_path: Path, ranks: int = 2) -> dict[str, Any]:
    program = os.fspath(Path(__file__).with_name("beside_ddp.py"))
    place = {"RANK": "RANK", "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    meeting = {"PARWRAP_INIT_METHOD": f"file://{tmp_path / 'parwrap'}"}
    ends = on_hosts(ranks, tmp_path, program, DEVICE, BACKEND, os.fspath(tmp_path / "by-hand"), way, **place, **meeting)
    assert {0} == {code for code, *_ in ends}, ends
    return json.loads(ends[0][1].splitlines()[-1])


@pytest.mark.parametrize("way", ["plain", "bf16", "accumulate", "zero1", "fsdp"])
def test_weights_are_bit_for_bit_those_of_ddp_by_hand(way, tmp_path):
    found = trained(way, tmp_path)

    assert found["difference"] == 0 < found["largest"] < float("inf")
    assert [] == found["waits"]


@pytest.mark.skipif(DEVICE == "cpu", reason="torch has these for GPUs only")
@pytest.mark.parametrize("way", ["fp16", "sync_bn", "compress", "compile", "cuda graphs"])
def test_so_they_are_with_what_torch_has_for_gpus(way, tmp_path):
    found = trained(way, tmp_path)

    assert found["difference"] == 0 < found["largest"] < float("inf")


@pytest.mark.parametrize(("way", "ranks"), [("local_sgd", 2), ("parameter_server", 3)])
def test_so_they_are_with_strategies_that_send_weights(way, ranks, tmp_path):
    found = trained(way, tmp_path, ranks)

    assert found["difference"] == 0 < found["largest"] < float("inf")


def free_port() -> int:
    """A free port below those that the system gives to other sockets, of which NCCL in tests beside this one opens many."""
    while True:
        port = random.randrange(20000, 30000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def on_two_nodes(folder: Path, script: str) -> list[tuple[int, str, str]]:
    """How the ``script`` ends on two nodes of one rank each."""
    (folder / "train.py").write_text(script.replace("DEVICE", repr(DEVICE)))
    port = free_port()
    nodes = ("--nnodes", "2", "--node-rank", "RANK", "--master-addr", "127.0.0.1", "--master-port", str(port))
    return on_hosts(2, folder, "-m", "parwrap.run", *nodes, "--nproc-per-node", "1", "--backend", BACKEND, "train.py")


def test_both_nodes_show_the_error_of_a_rank(tmp_path):
    ends = on_two_nodes(tmp_path, FAILS)

    assert [1, 1] == [code for code, *_ in ends]
    assert all("rank 1 of 2 on node 1" in said and "ValueError: 3 is enough" in said for _, _, said in ends), ends


FAILS = """
import parwrap, torch
from torch import nn
model = nn.Linear(4, 4).to(DEVICE)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(10000):
    if step == 3 and parwrap.rank() == 1:
        raise ValueError("3 is enough")
    model(torch.randn(2, 4, device=DEVICE)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


COMES_APART = """
import time, parwrap, torch
from torch import nn
torch.manual_seed(0)
model, other = nn.Linear(600, 600).to(DEVICE), nn.Linear(600, 90).to(DEVICE)
optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, other)]
def step(model, optimizer):
    loss = model(torch.randn(2, 600, device=DEVICE)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss
for number in range(40):
    if number == ODD_STEP and parwrap.rank() == 1:
        odd
    loss = step(model, optimizers[0])
    READS
    step(other, optimizers[1])
print("trained", loss.item())
"""
ODD = {
    "it stops": "break",
    "it skips a step": "continue",
    "it trains another model": "step(other, optimizers[1]); continue",
    "it gathers": "parwrap.gather(1)",
    "it exits": "raise SystemExit(0)",
    "it is killed": "import os; os.kill(os.getpid(), 9)",
    "it raises": "raise ValueError('unhappy')",
}


@pytest.mark.parametrize("reads", ["loss.item()", "pass"], ids=["the loss is read", "nothing is read"])
@pytest.mark.parametrize("number", [2, 37])
@pytest.mark.parametrize("odd", ODD)
def test_ranks_that_come_apart_end_within_seconds_with_a_place(odd, number, reads, tmp_path):
    began = time.monotonic()
    ends = on_two_nodes(tmp_path, COMES_APART.replace("ODD_STEP", str(number)).replace("odd", ODD[odd], 1).replace("READS", reads))

    assert time.monotonic() - began < ENDS_WITHIN
    assert 0 not in [code for code, *_ in ends], ends
    assert "trained" not in "".join(printed for _, printed, _ in ends)
    assert any(re.search(r"train\.py(:|\", line )\d+", said) for _, _, said in ends), ends
