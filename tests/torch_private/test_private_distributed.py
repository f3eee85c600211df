"""The private names of process groups and DDP that parwrap uses, in a group of one rank."""

import os
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from parwrap.torch_private import distributed


@pytest.fixture(autouse=True)
def _group(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch wraps it
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_process_groups_are_ended_without_waiting():
    dist.new_group([0])
    distributed.abort_process_groups()

    assert not dist.is_initialized()


def test_tensors_are_gathered_into_one_without_a_warning(recwarn):
    everything = torch.zeros(2)
    distributed.all_gather_single(everything, torch.ones(2))

    assert [1, 1] == everything.tolist()
    assert [] == recwarn.list


def test_gloo_goes_on_when_nccl_is_aborted():
    distributed.abort_nccl()  # tests/gpu has ranks that wait for it

    numbers = torch.ones(1)
    dist.all_reduce(numbers)
    assert 1 == numbers


@pytest.mark.parametrize("level", [dist.DebugLevel.OFF, dist.DebugLevel.DETAIL])
def test_all_communicators_are_aborted_together_also_inside_of_torchs_wrapper_for_debugging(level, monkeypatch):
    """Here gloo stands for NCCL, which no build for CPUs has."""
    did = []
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", dist.ProcessGroupGloo, raising=False)
    for name in ("_group_start", "abort", "_group_end"):
        monkeypatch.setattr(dist.ProcessGroupGloo, name, lambda self, name=name: did.append(name), raising=False)
    before = dist.get_debug_level()
    dist.set_debug_level(level)
    try:
        dist.new_group([0])
        distributed.abort_nccl()
    finally:
        dist.set_debug_level(before)

    assert ["_group_start", "abort", "abort", "_group_end"] == did


def test_another_group_can_be_the_default():
    before, other = dist.group.WORLD, dist.new_group([0])
    distributed.set_default_group(other)
    try:
        assert dist.group.WORLD is other
    finally:
        distributed.set_default_group(before)


def test_ddp_says_when_its_buckets_are_rebuilt():
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    assert not distributed.has_rebuilt_buckets(ddp)
    ddp(torch.ones(1, 2)).sum().backward()
    assert not distributed.has_rebuilt_buckets(ddp)
    ddp(torch.ones(1, 2))

    assert distributed.has_rebuilt_buckets(ddp)


@pytest.mark.parametrize("level", dist.DebugLevel.__members__.values())
def test_a_reducer_says_which_parameters_have_not_taken_part(level, monkeypatch):
    before = dist.get_debug_level()
    dist.set_debug_level(level)
    try:
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(100)))
        ddp = DistributedDataParallel(model)
        ddp(torch.ones(1, 2)).sum().backward()
        assert [] == distributed.unreached(ddp.reducer)
        ddp(torch.ones(1, 2))
        model[2](torch.ones(1, 2)).sum().backward()

        assert [0, 1, 2, 3, 6, 7, 8, 9] == distributed.unreached(ddp.reducer)[:8]
    finally:
        dist.set_debug_level(before)


@pytest.mark.parametrize("speaks", [distributed.GLOO_SPEAKS, True])
def test_gloo_is_quiet_and_what_else_is_written_meanwhile_is_shown(speaks, monkeypatch, capfd):
    monkeypatch.setattr(distributed, "GLOO_SPEAKS", speaks)
    capfd.readouterr()
    with distributed.quiet_gloo():
        dist.new_group([0])
        os.write(1, b"[Gloo] Rank 0 is connected to 0 peer ranks.\nby a thread\n" if speaks else b"by a thread\n")

    assert "by a thread\n" == capfd.readouterr().out


def test_the_ddp_whose_forward_runs_is_known():
    seen = []

    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self):
            seen.append(getattr(DistributedDataParallel, distributed.ACTIVE_DDP)())
            return self.weight

    model = DistributedDataParallel(Looks(), bucket_cap_mb=3)
    model()

    assert [model] == seen
    assert 3 * 2**20 == seen[0].bucket_bytes_cap
    assert getattr(DistributedDataParallel, distributed.ACTIVE_DDP)() is None
