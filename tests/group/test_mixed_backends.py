"""Process groups that carry tensors on the CPU and on GPUs by different backends, as on GPUs; here both are gloo's."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import parwrap
from parwrap.group import group as groups
from parwrap.group.device import uses_nccl
from parwrap.strategies.common import reducer
from sparse_steps import train_on_words

MIXED = "cpu:gloo,cuda:gloo"


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def train(model, forward):
    generator = torch.Generator().manual_seed(dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(5):
        optimizer.zero_grad()
        F.cross_entropy(forward(torch.randn(4, 6, generator=generator)), torch.randint(3, (4,), generator=generator)).backward()
        optimizer.step()
    return [value.clone() for value in model.state_dict().values()]


@contextmanager
def mixed_group(folder):
    """The process group of the test replaced by one that torch is asked to open with :data:`MIXED`."""
    world = replace(groups.current().world, init_method=(folder / "meeting").as_uri())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "torch_backend", lambda backend: MIXED)
        patch.setattr(groups, "_current", None)
        dist.distributed_c10d._update_default_pg(None)
        with groups.opened(world, backend="gloo"):
            yield


@pytest.mark.parametrize(
    "options", [{}, {"compress": "bf16"}, {"compress": "powersgd"}, {"strategy": "zero1"}, {"strategy": "fsdp"}], ids=str
)
@pytest.mark.ranks(2)
def test_training_is_what_it_is_with_one_backend(options, tmp_path):
    def plain():
        model = build()
        return train(model, model)

    expected = parwrap.distributed(**options)(plain)()
    with mixed_group(tmp_path):
        assert MIXED == dist.get_backend()
        actual = parwrap.distributed(**options)(plain)()

    assert all(torch.equal(one, other) for one, other in zip(expected, actual, strict=True))


@pytest.mark.ranks(3)
def test_collectives_servers_and_shared_statistics_take_it_too(tmp_path):
    @parwrap.sync_bn
    def plain():
        model = build()
        return train(model, model)

    with mixed_group(tmp_path):
        assert [0, 1, 2] == parwrap.gather(parwrap.rank())
        assert 3 == parwrap.reduce_sum(1)
        assert {"lr": 0} == parwrap.broadcast({"lr": parwrap.rank()})
        shared = parwrap.distributed(plain)()
        assert all(torch.equal(each[0], shared[0]) for each in parwrap.gather(shared))
        parwrap.distributed(strategy="parameter_server")(lambda: train(*[build()] * 2))()


@pytest.mark.ranks(2)
def test_a_group_of_the_users_own_is_asked_what_carries_gpus(monkeypatch):
    for told, expected in (("cpu:gloo,cuda:nccl", True), ("cuda:nccl", True), ("cpu:gloo,cuda:gloo", False), ("cpu:gloo", False)):
        monkeypatch.setattr(dist, "get_backend_config", lambda group=None, told=told: told)

        assert expected == uses_nccl()


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(20, 4, sparse=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.out(self.words(x).mean(1))


@pytest.mark.ranks(2)
def test_sparse_gradients_are_averaged_by_way_of_the_cpu_where_nccl_cannot_send_them(monkeypatch):
    def plain():
        torch.manual_seed(0)
        model = Words()
        return train_on_words(model, model)

    expected = parwrap.distributed(plain)()
    used = []
    monkeypatch.setattr(reducer, "uses_nccl", lambda: used.append(True) or True)
    actual = parwrap.distributed(plain)()

    assert used
    assert all(torch.equal(one, other) for one, other in zip(expected, actual, strict=True))


@pytest.mark.ranks(2)
def test_the_same_is_what_hand_written_ddp_gives(monkeypatch):
    torch.manual_seed(0)
    model = Words()
    expected = train_on_words(model, DistributedDataParallel(model))
    monkeypatch.setattr(reducer, "uses_nccl", lambda: True)

    @parwrap.distributed
    def plain():
        torch.manual_seed(0)
        model = Words()
        return train_on_words(model, model)

    assert all(torch.equal(one, other) for one, other in zip(expected, plain(), strict=True))
