import os

import pytest
import torch

from parwrap.errors import LaunchError
from parwrap.group.device import choose_backend, choose_device, visible_gpu
from parwrap.world.world import World


def test_each_local_rank_sees_one_gpu():
    assert ["4", "7"] == [visible_gpu(local_rank, ["4", "7"]) for local_rank in range(2)]


def test_more_ranks_than_gpus_are_refused():
    with pytest.raises(
        LaunchError,
        match=r"local rank 2 has no GPU of its own: only 2 visible \(4, 7\)\. Start at most 2 ranks per node, or pass backend='gloo'",
    ):
        visible_gpu(2, ["4", "7"])


def test_the_backend_goes_by_the_device_unless_it_is_asked_for():
    assert ("nccl", "gloo", "gloo") == (
        choose_backend(None, torch.device("cuda", 0)),
        choose_backend(None, torch.device("cpu")),
        choose_backend("gloo", torch.device("cuda", 0)),
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_gpus_ranks_train_on_the_cpu():
    assert torch.device("cpu") == choose_device(World(1, 2, 1, 2), None)


@pytest.fixture
def gpus(monkeypatch):
    """As many GPUs as asked for: a mock, for there need not be any."""

    def make(visible: str) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(visible.split(",")))
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
        monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: len(os.environ["CUDA_VISIBLE_DEVICES"].split(",")), raising=False)

    return make


@pytest.mark.parametrize(
    ("visible", "launcher", "mine"),
    [("4,5,6,7", "torchrun", "6"), ("4,5,6,7", "SLURM", "6"), ("6", "SLURM", "6"), ("GPU-ab", "Open MPI", "GPU-ab"), ("6,7", "SLURM", "6")],
)
def test_a_launcher_may_have_given_each_rank_gpus_of_its_own(gpus, visible, launcher, mine):
    gpus(visible)

    assert torch.device("cuda", 0) == choose_device(World(2, 4, 2, 4, launcher=launcher), None)
    assert mine == os.environ["CUDA_VISIBLE_DEVICES"]


def test_torchrun_has_not_so_more_ranks_than_gpus_are_refused(gpus):
    gpus("6")
    with pytest.raises(LaunchError, match="local rank 2 has no GPU of its own"):
        choose_device(World(2, 4, 2, 4, launcher="torchrun"), None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.ranks(1)
def test_a_rank_is_left_one_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")

    assert torch.device("cuda", 0) == choose_device(World(0, 2, 0, 2), None)
    assert 1 == torch.cuda.device_count()
