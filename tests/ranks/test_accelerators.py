"""Ranks on accelerators other than CUDA's GPUs. One is simulated: torch's PrivateUse1, under the name npu, with a module that counts.

It has no kernels, so tensors stay on the CPU; what is asked is which device and which backend a rank gets.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from parwrap.errors import LaunchError
from parwrap.loop.random_streams import ALL, RandomStreams, get_states, set_states
from parwrap.precision.choice import choose
from parwrap.rank_zero.calls import _on_own_gpu as own_device
from parwrap.ranks import device
from parwrap.ranks.world import World

ROOT = Path(__file__).parents[2]

SIMULATED = """
import os, sys, types
import torch
import torch.distributed as dist

torch.utils.rename_privateuse1_backend("npu")
current = [0]
torch._register_device_module("npu", types.SimpleNamespace(
    is_available=lambda: True,
    device_count=lambda: 2,
    current_device=lambda: current[0],
    set_device=lambda index: current.__setitem__(0, index),
))

def hccl(store, rank, size, timeout):
    return dist.ProcessGroupGloo(store, rank, size, timeout)

dist.Backend.register_backend("hccl", hccl, devices=["npu"])
"""
TRAINING = """
import parwrap
from parwrap.ranks.group import current as group

@parwrap.distributed(timeout=30)
def train():
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.full((1, 1), float(parwrap.rank()))).sum().backward()
    config = dist.get_backend_config()
    every = parwrap.gather([str(group().device), group().backend, torch.npu.current_device(), model.weight.grad.item()])
    print(config, every)

train()
"""


def run(folder, source, *command, **environ):
    (folder / "train.py").write_text(SIMULATED + source)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    return subprocess.Popen([*command, "train.py"], env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ranks_of(folder, number):
    given = {"WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number), "PARWRAP_INIT_METHOD": "parwrap://job/accelerators"}
    given |= {"TORCHELASTIC_RUN_ID": "1", "TMPDIR": str(folder)}
    processes = [run(folder, TRAINING, sys.executable, RANK=str(rank), LOCAL_RANK=str(rank), **given) for rank in range(number)]
    return [(*process.communicate(timeout=60), process.returncode) for process in processes]


def test_each_rank_has_its_accelerator_with_the_backend_that_torch_knows_for_it(tmp_path):
    (first, told, status), (_, other, last) = ranks_of(tmp_path, 2)

    assert (0, 0) == (status, last), (told, other)
    assert "cpu:gloo,npu:hccl [['npu:0', 'hccl', 0, 0.5], ['npu:1', 'hccl', 1, 0.5]]\n" == first


def test_more_ranks_than_accelerators_are_refused(tmp_path):
    ended = ranks_of(tmp_path, 3)

    assert "local rank 2 has no npu device: this node has 2, and ranks cannot share them. Start at most 2 ranks per node." in ended[2][1]


def test_the_launcher_starts_a_rank_on_each(tmp_path):
    counting = "from parwrap.run import main\nif __name__ == '__main__': sys.exit(main(['--dry-run', 'train.py']))"
    stdout, stderr = run(tmp_path, counting, sys.executable).communicate(timeout=60)

    assert stdout.startswith("ranks      2 ranks on 1 node\n"), stderr


def test_the_launcher_refuses_more_ranks_than_accelerators_as_the_ranks_do(tmp_path):
    counting = "from parwrap.run import main\nif __name__ == '__main__': sys.exit(main(['--nproc-per-node', '3', 'train.py']))"
    process = run(tmp_path, counting, sys.executable)
    stdout, stderr = process.communicate(timeout=60)

    said = "3 ranks are more than the 2 npu devices of this node, and ranks cannot share them. Start at most 2 ranks per node."
    assert said in " ".join(stderr.split())
    assert (2, "") == (process.returncode, stdout)


class Module:
    """The module of a simulated kind of accelerator, with a random stream, which draws the numbers after its seed."""

    def __init__(self, count):
        self.count, self.current, self.drawn = count, None, 0

    def manual_seed(self, seed):
        self.drawn = seed

    def get_rng_state(self):
        return torch.tensor(self.drawn)

    def set_rng_state(self, state):
        self.drawn = int(state)

    def max_memory_allocated(self, device):
        return 7

    def is_available(self):
        return self.count > 0

    def device_count(self):
        return self.count

    def set_device(self, index):
        self.current = index

    def current_device(self):
        return 1

    def get_device_name(self, device):
        return f"accelerator {device.index}"

    def is_bf16_supported(self, including_emulation=True):
        return including_emulation


@pytest.fixture
def accelerators(monkeypatch):
    """Give torch ``count`` accelerators of a kind."""

    def give(kind, count):
        module = Module(count)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
        monkeypatch.setattr(torch, "get_device_module", lambda device: module)
        return module

    return give


@pytest.mark.parametrize("kind", ["xpu", "hpu"])
def test_the_current_device_is_set(accelerators, kind):
    module = accelerators(kind, 4)

    assert torch.device(kind, 3) == device.choose_device(World(3, 4, 3, 4, launcher="torchrun"), None)
    assert (3, 4, []) == (module.current, device.gpu_count(), device.visible_gpus())


def test_a_launcher_may_show_each_rank_one(accelerators):
    accelerators("xpu", 1)

    assert torch.device("xpu", 0) == device.choose_device(World(3, 4, 3, 4, launcher="SLURM"), None)
    with pytest.raises(LaunchError, match="local rank 3 has no xpu device: this node has 1"):
        device.choose_device(World(3, 4, 3, 4, launcher="torchrun"), None)


@pytest.mark.parametrize(("kind", "count"), [("mps", 1), ("xpu", 0)])
def test_several_ranks_train_on_the_cpu_beside_one_that_they_cannot_use(accelerators, kind, count):
    accelerators(kind, count)

    assert (torch.device("cpu"), 0) == (device.choose_device(World(1, 2, 1, 2), None), device.gpu_count())


def test_the_random_stream_of_an_accelerator_belongs_to_a_set(accelerators):
    """As CUDA's: shared outside of training passes, and in them each rank's own."""
    module = accelerators("xpu", 4)
    streams = RandomStreams(rank=2)
    module.manual_seed(10)
    streams.begin(0)
    with streams.used(ALL):
        own = module.drawn
        module.drawn += 1

    assert 10 == module.drawn != own
    with streams.used(ALL):
        assert own + 1 == module.drawn
    states = get_states()
    module.manual_seed(5)
    set_states(states)
    assert 10 == module.drawn


def test_the_peak_memory_is_that_of_the_accelerator(accelerators):
    accelerators("xpu", 4)

    assert (7, 0) == (device.most_allocated(torch.device("xpu", 0)), device.most_allocated(torch.device("cpu")))


def test_a_process_computes_on_the_current_accelerator(accelerators):
    accelerators("xpu", 4)

    assert torch.device("xpu", 1) == device.current_device()
    assert "accelerator 1" == device.processor(torch.device("xpu", 1)) != device.processor(torch.device("cpu"))
    assert torch.float16 == choose("auto", None, "xpu").dtype  # it only emulates bf16


def test_without_an_accelerator_a_process_computes_on_the_cpu(accelerators):
    accelerators("xpu", 0)

    assert (torch.device("cpu"), None) == (device.current_device(), device.accelerator())


@pytest.mark.parametrize(("location", "wanted"), [("xpu:3", "xpu"), (torch.device("xpu", 3), "xpu"), ("cpu", "cpu"), ("cuda:1", "cuda:1")])
def test_a_file_is_loaded_onto_the_ranks_own(accelerators, location, wanted):
    accelerators("xpu", 4)

    assert wanted == own_device(location)


def test_torch_names_the_backend():
    assert "xccl" == device.choose_backend(None, torch.device("xpu", 0))
