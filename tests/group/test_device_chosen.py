"""The choice of a rank's GPU against a driver that behaves as CUDA's does: it reads the visible devices once, when it is first asked."""

import os
import warnings

import pytest
import torch

from parwrap.group.device import choose_device, torch_backend
from parwrap.world.world import World

GPUS = 4


class Driver:
    """Stands for CUDA's driver and torch above it.

    Attributes:
        seen: the GPUs that this process can use, once the driver was asked for them.
        current: torch's current device.
    """

    def __init__(self):
        self.seen, self.current, self.initialized = None, 0, False

    def count(self):
        self.seen = self.seen or self.visible()
        return len(self.seen)

    def visible(self):
        return [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name] or [str(number) for number in range(GPUS)]

    def device_count(self):
        """torch asks NVML as long as CUDA has started, and NVML reads the variable each time."""
        return self.count() if self.initialized else len(self.visible())

    def set_device(self, device):
        self.count()
        self.current, self.initialized = torch.device("cuda", device).index, True

    def used_by(self, device):
        self.count()
        return self.seen[device.index]


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", driver.device_count)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: driver.initialized)
    monkeypatch.setattr(torch.cuda, "set_device", driver.set_device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: driver.current)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", driver.count, raising=False)
    return driver


def rank(local_rank, launcher="torchrun", size=GPUS):
    return World(local_rank, size, local_rank, size, launcher=launcher)


@pytest.mark.parametrize("local_rank", range(GPUS))
def test_each_rank_has_a_gpu_of_its_own_which_is_cuda_0(driver, local_rank, nothing_is_warned_of):
    device = choose_device(rank(local_rank), None)

    assert (torch.device("cuda", 0), str(local_rank)) == (device, driver.used_by(device))
    assert 1 == torch.cuda.device_count()


@pytest.mark.parametrize("backend", [None, "gloo"])
@pytest.mark.parametrize("local_rank", range(GPUS))
def test_a_driver_that_was_asked_before_is_not_believed_to_read_the_variable_again(driver, local_rank, backend):
    driver.count()  # what torch.cuda.is_available() does

    with pytest.warns(
        UserWarning, match=r"Use CUDA only inside the decorated function \(torch.cuda.is_available\(\) initializes it too\), or run"
    ):
        device = choose_device(rank(local_rank), backend)

    assert (torch.device("cuda", local_rank), str(local_rank)) == (device, driver.used_by(device))
    assert local_rank == driver.current
    assert "0,1,2,3" == os.environ["CUDA_VISIBLE_DEVICES"]  # which is what this process sees


def test_a_driver_that_was_asked_where_one_gpu_is_visible_is_no_problem(driver, monkeypatch, nothing_is_warned_of):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    driver.count()

    device = choose_device(rank(2, launcher="SLURM"), None)

    assert (torch.device("cuda", 0), "2") == (device, driver.used_by(device))


@pytest.mark.parametrize(("local_rank", "gpu"), [(0, "0"), (3, "3"), (4, "0"), (6, "2")])
def test_ranks_on_gloo_share_gpus_and_each_sees_one(driver, local_rank, gpu, nothing_is_warned_of):
    device = choose_device(rank(local_rank, size=8), "gloo")

    assert (torch.device("cuda", 0), gpu) == (device, driver.used_by(device))


def test_only_gpus_that_are_there_are_counted(driver, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,8,9")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)  # torch's, which stops at the first that is not there

    assert {"0", "1"} == {_gpu(choose_device(rank(local_rank, launcher="SLURM"), None)) for local_rank in range(4)}


def _gpu(device):
    chosen = os.environ["CUDA_VISIBLE_DEVICES"].split(",")[device.index]
    os.environ["CUDA_VISIBLE_DEVICES"] = "0,1,8,9"
    return chosen


def test_no_gpu_is_counted_by_the_driver_where_torch_sees_none(driver, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        assert torch.device("cpu") == choose_device(rank(1), None)
    assert driver.seen is None


def test_what_is_on_the_cpu_goes_by_gloo_where_nccl_carries_the_rest():
    assert ("cpu:gloo,cuda:nccl", "gloo") == (torch_backend("nccl"), torch_backend("gloo"))
