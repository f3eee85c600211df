"""Batch norms of a model on several devices, each separate and shared."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import parwrap
from on_devices import THREE, TWO, close, normed, same


def one_step(model, x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return [loss, *(p.grad for p in model.parameters()), *(each.float() for each in model.buffers())]


@pytest.mark.parametrize(
    ("rows", "dtype", "offset", "within"), [(7, torch.float32, 0, 1e-6), (7, torch.float64, 1000, 1e-9), (3, torch.float64, 0, 1e-12)]
)
@pytest.mark.parametrize("gather", [True, False])
def test_sync_bn_inside_equals_one_large_batch(rows, gather, dtype, offset, within):
    torch.manual_seed(0)
    model, x, y = normed().to(dtype), offset + torch.randn(rows, 1, 4, 4, dtype=dtype), torch.randint(3, (rows,))
    other = copy.deepcopy(model)
    expected = one_step(model, x, y)
    actual = parwrap.data_parallel(device_ids=THREE, gather=gather)(parwrap.sync_bn(one_step))(other, x, y)

    assert close(expected, actual, within)


def test_without_sync_bn_running_statistics_are_those_of_the_first_replica():
    norm, x = nn.BatchNorm1d(1, momentum=1.0), torch.arange(8.0)[:, None]
    with parwrap.data_parallel(device_ids=TWO):
        out = norm(x)

    assert 1.5 == norm.running_mean.item()
    assert 1 == norm.num_batches_tracked.item()
    assert torch.allclose(out[:4], out[4:])


def test_with_one_replica_sync_bn_changes_nothing():
    model, x, y = normed(), torch.randn(4, 1, 4, 4), torch.randint(3, (4,))
    other = copy.deepcopy(model)
    expected = one_step(model, x, y)
    actual = parwrap.data_parallel(device_ids=["cpu"])(parwrap.sync_bn(one_step))(other, x, y)

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
        (
            True,
            "replica 0 on cpu is in batch norm 'first' while replica 1 on cpu is in batch norm 'second'. Run the same layers in the same ",
        ),
        (
            False,
            "replica 0 on cpu is in batch norm 'first', but replica 1 on cpu has already finished its forward pass. Run the same ",
        ),
    ],
)
def test_replicas_in_different_layers_are_named(both, message):
    with pytest.raises(parwrap.UsageError, match=re.escape(message)), parwrap.data_parallel(device_ids=TWO), parwrap.sync_bn():
        Skips(both)(torch.arange(4.0)[:, None])


def test_a_batch_of_one_value_has_no_statistics():
    class Picks(nn.BatchNorm1d):
        def forward(self, x):
            return super().forward(x[:0] if self.training and x[0, 0] else x)

    @parwrap.data_parallel(device_ids=TWO)
    @parwrap.sync_bn
    def run():
        nn.Sequential(nn.Identity(), norm)(torch.tensor([[0.0], [1.0]]))

    norm = Picks(1)
    norm._check_input_dim = lambda x: None
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        run()


def test_a_batch_norm_in_a_checkpoint_is_refused_and_not_normalized_otherwise_in_the_backward():
    model = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2))

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.model, x, use_reentrant=False)

    with (
        parwrap.data_parallel(device_ids=TWO),
        parwrap.sync_bn(),
        pytest.raises(parwrap.UsageError, match="a batch norm inside a checkpoi"),
    ):
        Checkpointed()(torch.randn(4, 1)).sum().backward()


def test_checkpoints_without_it_are_as_ever():
    def loss_of(model, x, y):
        return F.cross_entropy(torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False), y)

    assert same(loss_of)


def test_sync_bn_among_some_ranks_has_no_meaning_for_replicas():
    with (
        parwrap.data_parallel(device_ids=TWO),
        parwrap.sync_bn(group_size=1),
        pytest.raises(parwrap.UsageError, match="are for ranks: remove t"),
    ):
        nn.BatchNorm1d(2)(torch.randn(4, 2))


@pytest.mark.skipif(torch.cuda.device_count() == 0, reason="torch sees no GPU here")
@pytest.mark.parametrize("gather", [True, False])
def test_gpus_give_what_one_gives(gather):
    torch.manual_seed(0)
    gpus = list(range(torch.cuda.device_count()))
    model, x, y = normed().cuda(0).double(), torch.randn(9, 1, 4, 4).cuda(0).double(), torch.randint(3, (9,)).cuda(0)
    other = copy.deepcopy(model)
    expected = one_step(model, x, y)
    actual = parwrap.data_parallel(device_ids=gpus if len(gpus) > 1 else [0, 0], gather=gather)(parwrap.sync_bn(one_step))(other, x, y)

    assert close(expected, actual)
