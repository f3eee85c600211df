"""The device of a rank. The driver is a mock that behaves like CUDA's: it reads the visible devices once, when it is first asked."""

import os
import sys
import warnings

import pytest
import torch

from parwrap.errors import LaunchError
from parwrap.ranks import device as device_module
from parwrap.ranks.device import choose_backend, choose_device, gpu_count, see_only, torch_backend, visible_gpu, visible_gpus
from parwrap.ranks.world import World

GPUS = 4


class Driver:
    """Stands for CUDA's driver and torch above it: a mock.

    Attributes:
        seen: the GPUs that this process can use, once the driver was asked for them.
        current: torch's current device.
        has_nvml: whether torch can count GPUs without the driver.
    """

    def __init__(self):
        self.seen, self.current, self.initialized, self.has_nvml = None, 0, False, True

    def count(self):
        self.seen = self.visible() if self.seen is None else self.seen
        return len(self.seen)

    def visible(self):
        names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name] or [str(number) for number in range(GPUS)]
        return names[:1] if is_mig(names) else names  # CUDA gives a process one instance of a GPU in parts

    def device_count(self):
        """torch asks NVML until CUDA has started, and NVML reads the variable each time; of instances it asks the driver."""
        return self.count() if self.initialized or self.by_nvml() < 0 else self.by_nvml()

    def by_nvml(self):
        return len(self.visible()) if self.has_nvml and not is_mig(self.visible()) else -1

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
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", driver.by_nvml)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)  # an earlier test may have started the real driver
    monkeypatch.setattr(device_module, "_given", None)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", driver.count, raising=False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    return driver


def is_mig(names):
    return names[0].startswith("MIG-")


def rank(local_rank, launcher="torchrun", size=GPUS):
    return World(local_rank, size, local_rank, size, launcher=launcher)


@pytest.mark.parametrize("local_rank", range(GPUS))
def test_each_rank_has_a_gpu_of_its_own_which_is_cuda_0(driver, local_rank, nothing_is_warned_of):
    device = choose_device(rank(local_rank), None)

    assert (torch.device("cuda", 0), str(local_rank)) == (device, driver.used_by(device))
    assert 1 == torch.cuda.device_count()


@pytest.mark.parametrize("backend", [None, "gloo"])
@pytest.mark.parametrize("local_rank", range(GPUS))
def test_a_driver_that_was_asked_before_does_not_read_the_variable_again(driver, local_rank, backend):
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


@pytest.mark.parametrize("launcher", ["torchrun", "SLURM"])
@pytest.mark.parametrize("local_rank", range(2))
def test_each_rank_has_an_instance_of_a_gpu_in_parts(driver, local_rank, launcher, monkeypatch, nothing_is_warned_of):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-ab,MIG-cd")

    device = choose_device(rank(local_rank, launcher, size=2), None)

    assert (torch.device("cuda", 0), ["MIG-ab", "MIG-cd"][local_rank]) == (device, driver.used_by(device))


def test_a_launcher_counts_the_instances_and_starts_no_driver(driver, monkeypatch):
    assert GPUS == gpu_count()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-ab,MIG-cd")

    assert 2 == gpu_count()
    assert driver.seen is None


def test_more_ranks_than_instances_are_refused(driver, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-ab,MIG-cd")

    with pytest.raises(LaunchError, match=r"local rank 2 has no GPU: the ranks of this node see only 2 GPUs \(MIG-ab, MIG-cd\)"):
        choose_device(rank(2, size=3), None)


def test_instances_that_torch_cannot_use_leave_the_cpu(driver, monkeypatch, nothing_is_warned_of):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-ab,MIG-cd")
    driver.seen = []

    assert torch.device("cpu") == choose_device(rank(1, size=2), None)
    assert "MIG-ab,MIG-cd" == os.environ["CUDA_VISIBLE_DEVICES"]


@pytest.mark.parametrize("local_rank", range(GPUS))
def test_without_nvml_another_process_counts_so_that_the_driver_starts_with_one_gpu(driver, local_rank, nothing_is_warned_of):
    driver.has_nvml = False

    device = choose_device(rank(local_rank), None)

    assert (torch.device("cuda", 0), str(local_rank)) == (device, driver.used_by(device))


def test_without_nvml_a_driver_that_has_started_counts_here(driver, monkeypatch):
    driver.has_nvml = False
    driver.count()
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)  # which torch says in the child
    driver.seen = ["0", "1"]

    assert 2 == gpu_count()


@pytest.mark.parametrize(
    ("visible", "chosen"),
    [(None, "3"), ("4,5,6,7", "7"), ("GPU-a,GPU-b", "GPU-b"), ("MIG-a,MIG-b,MIG-c", "MIG-a"), (" 2 , 5", "5")],
)
@pytest.mark.parametrize("has_nvml", [True, False])
def test_the_launcher_gives_a_rank_its_gpu_before_the_driver_starts(driver, monkeypatch, visible, chosen, has_nvml, nothing_is_warned_of):
    """Also where more ranks than GPUs share them, and whatever the rank has done with CUDA before its scope opens."""
    driver.has_nvml = has_nvml
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("PARWRAP_BACKEND", "gloo")
    gpus = visible_gpus()
    assert driver.seen is None  # the launcher has not started it
    see_only(gpus[3 % len(gpus)])
    driver.set_device(0)

    device = choose_device(rank(3), None)

    assert (torch.device("cuda", 0), chosen) == (device, driver.used_by(device))
    assert chosen == os.environ["CUDA_VISIBLE_DEVICES"]


def test_a_script_that_has_hidden_its_gpu_trains_on_the_cpu(driver, monkeypatch):
    see_only("1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)

    assert torch.device("cpu") == choose_device(rank(1), None)


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ({}, "1"),
        ({"CUDA_VISIBLE_DEVICES": "4,5"}, "5"),
        ({"HIP_VISIBLE_DEVICES": "6,7", "CUDA_VISIBLE_DEVICES": "4,5"}, "7"),
        ({"ROCR_VISIBLE_DEVICES": "2,3"}, "1"),
    ],
)
def test_rocm_has_other_variables_of_which_rocr_counts_first(driver, monkeypatch, given, chosen):
    monkeypatch.setattr(device_module, "VISIBLE", ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"))
    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    choose_device(rank(1), None)

    assert [chosen] * 2 == [os.environ.pop(name) for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")]
    assert given.get("ROCR_VISIBLE_DEVICES") == os.environ.get("ROCR_VISIBLE_DEVICES")


@pytest.mark.parametrize("local_rank", range(2))
def test_each_of_two_containers_on_a_node_has_one_gpu(driver, local_rank, monkeypatch, nothing_is_warned_of):
    monkeypatch.setattr(sys.modules[__name__], "GPUS", 1)

    device = choose_device(rank(local_rank, "SLURM", size=2), None)

    assert (torch.device("cuda", 0), "0") == (device, driver.used_by(device))


@pytest.mark.parametrize(("local_rank", "gpu"), [(0, "0"), (3, "3"), (4, "0"), (6, "2")])
def test_ranks_on_gloo_share_gpus_and_each_sees_one(driver, local_rank, gpu, nothing_is_warned_of):
    device = choose_device(rank(local_rank, size=8), "gloo")

    assert (torch.device("cuda", 0), gpu) == (device, driver.used_by(device))


def test_so_they_do_where_their_launcher_says_gloo(driver, monkeypatch, nothing_is_warned_of):
    monkeypatch.setenv("PARWRAP_BACKEND", "gloo")

    device = choose_device(rank(4, size=8), None)

    assert (torch.device("cuda", 0), "0") == (device, driver.used_by(device))
    assert ("gloo", "nccl") == (choose_backend(None, device), choose_backend("nccl", device))


def test_only_gpus_that_are_there_are_counted(driver, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,8,9")
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: 2)  # torch's, which stops at the first that is not there

    assert {"0", "1"} == {_gpu(choose_device(rank(local_rank, launcher="SLURM"), None)) for local_rank in range(4)}


def _gpu(device):
    chosen = os.environ["CUDA_VISIBLE_DEVICES"].split(",")[device.index]
    os.environ["CUDA_VISIBLE_DEVICES"] = "0,1,8,9"
    return chosen


def test_no_gpu_is_counted_by_the_driver_where_torch_sees_none(driver, monkeypatch):
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        assert torch.device("cpu") == choose_device(rank(1), None)
    assert driver.seen is None


def test_gloo_handles_cpu_tensors_and_nccl_those_on_gpus():
    assert ("cpu:gloo,cuda:nccl", "gloo") == (torch_backend("nccl"), torch_backend("gloo"))


def test_each_local_rank_sees_one_gpu():
    assert ["4", "7"] == [visible_gpu(local_rank, ["4", "7"]) for local_rank in range(2)]


def test_more_ranks_than_gpus_are_refused():
    with pytest.raises(
        LaunchError,
        match=r"local rank 2 has no GPU: the ranks of this node see only 2 GPUs \(4, 7\)\. Start at most 2 ranks per node, or pass "
        r"backend='gloo' \(--backend gloo\) to share GPUs\.$",
    ):
        visible_gpu(2, ["4", "7"])


def test_the_backend_follows_the_device_unless_it_is_set():
    assert ("nccl", "gloo", "gloo") == (
        choose_backend(None, torch.device("cuda", 0)),
        choose_backend(None, torch.device("cpu")),
        choose_backend("gloo", torch.device("cuda", 0)),
    )


@pytest.mark.parametrize(
    ("visible", "launcher", "chosen"),
    [("4,5,6,7", "torchrun", "6"), ("4,5,6,7", "SLURM", "6"), ("6", "SLURM", "6"), ("GPU-ab", "Open MPI", "GPU-ab"), ("6,7", "SLURM", "6")],
)
def test_a_launcher_may_show_each_rank_its_own_gpus(driver, monkeypatch, visible, launcher, chosen):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    assert torch.device("cuda", 0) == choose_device(rank(2, launcher), None)
    assert chosen == os.environ["CUDA_VISIBLE_DEVICES"]


def test_torchrun_shows_all_so_more_ranks_than_gpus_are_refused(driver, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6")

    with pytest.raises(LaunchError, match="local rank 2 has no GPU"):
        choose_device(rank(2), None)


def test_without_gpus_ranks_train_on_the_cpu():
    assert torch.device("cpu") == choose_device(World(1, 2, 1, 2), None)


@pytest.mark.gpu
@pytest.mark.ranks(1, fresh=True)
def test_a_rank_keeps_one_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")

    assert torch.device("cuda", 0) == choose_device(World(0, 2, 0, 2), None)
    assert 1 == torch.cuda.device_count()
