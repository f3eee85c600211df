"""Ranks that share the one GPU of a machine, started with the command and from Python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import parwrap
from parwrap.testing.rank_pools import rank_environ

pytestmark = pytest.mark.gpu

ROOT = Path(parwrap.__file__).parents[1]
MORE = torch.cuda.device_count() + 1
"""Ranks, one more than this machine has GPUs."""

TRAINING = """
import parwrap, torch
from torch import nn

def train(model):
    assert torch.cuda.device_count() == 1
    model.to("cuda:0")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 1), 1.0 + parwrap.rank(), device="cuda")).mean().backward()
        optimizer.step()
    return [p.item() for p in model.parameters()]

"""

FROM_PYTHON = """
if __name__ == "__main__":
    STARTED
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(1.0), model.bias.fill_(0.0)
    weights = parwrap.distributed(train, nprocs=2, backend="gloo")(model)
    print(weights, model.weight.item(), model.weight.device.type)
"""


def run(folder: Path, source: str, *command: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(source)
    environment = {**rank_environ(), "PYTHONPATH": str(ROOT)}
    words = [sys.executable, *command, "train.py"]
    return subprocess.run(words, env=environment, cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("started", ["", "torch.cuda.is_available()"], ids=["forked", "spawned, as CUDA has started"])
def test_a_model_of_the_caller_comes_back_to_the_cpu(started, tmp_path):
    ended = run(tmp_path, TRAINING + FROM_PYTHON.replace("STARTED", started))

    weights, weight, device = ended.stdout.rsplit(" ", 2)
    # the mean gradient of the weight is the mean input, 1.5, and that of the bias is 1
    assert pytest.approx([1 - 3 * 0.1 * 1.5, -3 * 0.1]) == [float(each) for each in weights.strip("[]").split(",")], ended.stderr
    assert (pytest.approx(1 - 3 * 0.1 * 1.5), "cpu") == (float(weight), device.strip())


def test_the_command_starts_ranks_that_share_the_gpu(tmp_path):
    ended = run(tmp_path, TRAINING + "print(train(nn.Linear(1, 1)))", "-m", "parwrap.run", "--nproc-per-node", "2", "--backend", "gloo")

    assert 0 == ended.returncode, ended.stderr
    assert 1 == ended.stdout.count("[")


def test_a_rank_on_each_gpu_is_a_word(tmp_path):
    ended = run(tmp_path, "import parwrap\nprint(parwrap.world_size())", "-m", "parwrap.run", "--nproc-per-node", "gpu")

    assert (f"{torch.cuda.device_count()}\n", 0) == (ended.stdout, ended.returncode), ended.stderr


def test_more_ranks_than_gpus_share_them_and_say_so(tmp_path):
    ended = run(tmp_path, TRAINING + "print(train(nn.Linear(1, 1)))", "-m", "parwrap.run", "--nproc-per-node", str(MORE))

    assert f"{MORE} ranks share {MORE - 1} GPU" in ended.stderr
    assert 0 == ended.returncode, ended.stderr


def test_so_do_ranks_of_a_call(tmp_path):
    ended = run(tmp_path, TRAINING + FROM_PYTHON.replace("STARTED", "").replace('nprocs=2, backend="gloo"', f"nprocs={MORE}"))

    assert f"UserWarning: parwrap: {MORE} ranks share {MORE - 1} GPU" in ended.stderr
    assert "cpu" == ended.stdout.split()[-1], ended.stderr


def test_what_asks_for_nccl_needs_a_gpu_for_each_rank(tmp_path):
    ended = run(tmp_path, "", "-m", "parwrap.run", "--nproc-per-node", str(MORE), "--backend", "nccl")

    assert 2 == ended.returncode
    assert f"{MORE} ranks are more than the GPUs that torch can use on this node" in ended.stderr.replace("\n", " ")


def test_another_device_number_is_explained(tmp_path):
    ended = run(
        tmp_path, "import torch\ntorch.zeros(1, device='cuda:1')", "-m", "parwrap.run", "--nproc-per-node", "2", "--backend", "gloo"
    )

    assert 1 == ended.returncode
    assert "parwrap: each rank sees only its own GPU, which is 'cuda:0' there" in ended.stderr
