"""Batch norms under ``data_parallel``: with ``sync_bn`` they use the whole batch, as one device does."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import parwrap

TWO, THREE = ["cpu"] * 2, ["cpu"] * 3


def normed():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3), nn.BatchNorm1d(3))


def one_step(model, x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return [loss, *(p.grad for p in model.parameters()), *(each.float() for each in model.buffers())]


@pytest.mark.parametrize(
    ("rows", "dtype", "offset", "within"), [(7, torch.float32, 0, 1e-6), (7, torch.float64, 1000, 1e-9), (3, torch.float64, 0, 1e-12)]
)
@pytest.mark.parametrize("gather", [True, False])
def test_sync_bn_equals_one_large_batch(rows, gather, dtype, offset, within):
    torch.manual_seed(0)
    model, x, y = normed().to(dtype), offset + torch.randn(rows, 1, 4, 4, dtype=dtype), torch.randint(3, (rows,))
    other = copy.deepcopy(model)
    expected = one_step(model, x, y)
    actual = parwrap.data_parallel(THREE, gather=gather)(parwrap.sync_bn(one_step))(other, x, y)

    assert all((one - two).abs().max() < within for one, two in zip(expected, actual, strict=True))


def test_the_weights_after_steps_equal_those_of_one_large_batch():
    def train():
        torch.manual_seed(0)
        model = normed().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for rows in (6, 7, 2, 6):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(rows, 1, 4, 4, dtype=torch.float64)), torch.randint(3, (rows,))).backward()
            optimizer.step()
        return [each.double() for each in model.state_dict().values()]

    actual = parwrap.data_parallel(TWO)(parwrap.sync_bn(train))()

    assert all((one - two).abs().max() < 1e-9 for one, two in zip(train(), actual, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("gather", [True, False])
def test_gpus_give_what_one_gives(gather):
    torch.manual_seed(0)
    gpus = list(range(torch.cuda.device_count()))
    model, x, y = normed().cuda(0).double(), torch.randn(9, 1, 4, 4).cuda(0).double(), torch.randint(3, (9,)).cuda(0)
    other = copy.deepcopy(model)
    expected = one_step(model, x, y)
    actual = parwrap.data_parallel(gpus if len(gpus) > 1 else [0, 0], gather=gather)(parwrap.sync_bn(one_step))(other, x, y)

    assert all((one - two).abs().max() < 1e-6 for one, two in zip(expected, actual, strict=True))


def test_with_one_device_sync_bn_changes_nothing():
    model, x, y = normed(), torch.randn(4, 1, 4, 4), torch.randint(3, (4,))
    other = copy.deepcopy(model)
    expected = one_step(model, x, y)
    actual = parwrap.data_parallel(["cpu"])(parwrap.sync_bn(one_step))(other, x, y)

    assert all(torch.equal(one, two) for one, two in zip(expected, actual, strict=True))


class Skips(nn.Module):
    def __init__(self, both):
        super().__init__()
        self.first, self.second, self.both = nn.BatchNorm1d(1), nn.BatchNorm1d(1), both

    def forward(self, x):
        if x[0, 0] > 1:
            return self.second(x) if self.both else x
        return self.first(x)


@pytest.mark.parametrize(
    ("both", "message"),
    [
        (True, "replica 0 on cpu is in batch norm 'first' while replica 1 on cpu is in batch norm 'second'. Run the same layers in the "),
        (False, "replica 0 on cpu is in batch norm 'first', but replica 1 on cpu has finished its forward. Run the same layers"),
    ],
)
def test_replicas_in_different_layers_are_named(both, message):
    with pytest.raises(parwrap.UsageError, match=re.escape(message)), parwrap.data_parallel(TWO), parwrap.sync_bn():
        Skips(both)(torch.arange(4.0)[:, None])


def test_a_batch_of_one_value_has_no_statistics():
    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return F.batch_norm(x[: int(x[0, 0] == 0)], None, None, self.weight, training=True)

    with (
        pytest.raises(ValueError, match="Expected more than 1 value per channel when training, got 1 in all replicas together"),
        parwrap.data_parallel(TWO),
        parwrap.sync_bn(),
    ):
        First()(torch.tensor([[0.0], [1.0]]))


def test_a_batch_norm_inside_a_checkpoint_is_refused():
    class Checkpointed(nn.Sequential):
        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)

    with (
        parwrap.data_parallel(TWO),
        parwrap.sync_bn(),
        pytest.raises(parwrap.UsageError, match="a batch norm inside a checkpoint is recomputed in the backward, where the replicas of"),
    ):
        Checkpointed(nn.Linear(1, 2), nn.BatchNorm1d(2))(torch.randn(4, 1)).sum().backward()


def test_groups_of_ranks_have_no_meaning_for_replicas():
    with (
        parwrap.data_parallel(TWO),
        parwrap.sync_bn(group_size=1),
        pytest.raises(parwrap.UsageError, match="process_group and group_size say which ranks share: remove them"),
    ):
        nn.BatchNorm1d(2)(torch.randn(4, 2))
