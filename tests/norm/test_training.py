"""Training with batch norms on ranks: with ``batch="global"`` and ``sync_bn`` it gives the weights and statistics of one process."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import parwrap
from parwrap.ranks.group import alone

SHAPES = {nn.BatchNorm1d: (3,), nn.BatchNorm2d: (3, 4, 4), nn.BatchNorm3d: (3, 2, 2, 2)}


def frozen(model):
    model.train()
    model[1].eval()


def first_half(model):
    """The second layer trains from the second epoch on."""
    model.train()
    model[3].eval()
    model[1].train()


class Named(torch.Tensor):
    pass


def named(x, y):
    return TensorDataset(x.as_subclass(Named), y)


CASES = {
    "1d": {},
    "2d": {"kind": nn.BatchNorm2d},
    "3d": {"kind": nn.BatchNorm3d},
    "float32": {"dtype": torch.float32},
    "affine=False": {"affine": False},
    "momentum=None": {"momentum": None},
    "track_running_stats=False": {"track_running_stats": False},
    "a frozen layer": {"train": frozen},
    "another layer is frozen": {"train": first_half},
    "a sum as loss": {"loss": "sum"},
    "a subclass of tensors": {"dataset": named},
}


def build(kind, dtype, **options):
    torch.manual_seed(0)
    shape = SHAPES[kind]
    model = nn.Sequential(
        nn.Flatten(), nn.BatchNorm1d(torch.Size(shape).numel(), **options), nn.Unflatten(1, shape), kind(3, **options), nn.Flatten(),
        nn.Linear(torch.Size(shape).numel(), 2), nn.Tanh(), nn.BatchNorm1d(2, **options), nn.Linear(2, 1),
    )  # fmt: skip
    return model.to(dtype)


def trained(kind=nn.BatchNorm1d, dtype=torch.float64, train=nn.Module.train, loss="mean", samples=14, dataset=TensorDataset, **options):
    """The state after training with batches of 6, 6 and 2 samples."""
    model = build(kind, dtype, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(samples, *SHAPES[kind], generator=generator, dtype=dtype), torch.randn(samples, 1, generator=generator, dtype=dtype)
    loader = DataLoader(dataset(x, y), batch_size=6, shuffle=dataset is TensorDataset)
    for _ in range(2):
        train(model)
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets, reduction=loss).backward()
            optimizer.step()
    return model.state_dict()


def both(options, **case):
    """The states that ranks and one process leave."""
    streams = torch.get_rng_state()
    together = parwrap.distributed(batch="global", **options)(parwrap.sync_bn(trained))(**case)
    torch.set_rng_state(streams)
    with alone():
        expected = trained(**case)
    return expected, together


def assert_same(expected, together, within):
    apart = {name: float((together[name].double() - value.double()).abs().max()) for name, value in expected.items()}

    assert {} == {name: off for name, off in apart.items() if not off < within}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_what_one_process_trains(case):
    options = CASES[case]
    expected, together = both({"loss": options.get("loss", "mean")}, **options)

    assert_same(expected, together, 1e-5 if "dtype" in options else 1e-10)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("case", ["2d", "float32", "momentum=None", "track_running_stats=False", "a sum as loss"])
def test_a_rank_without_a_part_of_the_last_batch_does_not_count(case):
    options = CASES[case]
    expected, together = both({"loss": options.get("loss", "mean")}, **options)

    assert_same(expected, together, 1e-5 if "dtype" in options else 1e-10)


class Stream(IterableDataset):
    def __init__(self, *tensors):
        self.tensors = tensors

    def __iter__(self):
        return zip(*self.tensors, strict=True)


@pytest.mark.ranks(3)
def test_the_batches_of_a_stream():
    assert_same(*both({}, dataset=Stream), 1e-10)


def joined():
    """One step on 5 samples, of which rank 0 reads the first 4, and rank 1 the last one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in DataLoader(torch.randn(5, 2, dtype=torch.float64), batch_size=4):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.ranks(2)
def test_uneven_parts_that_join_count_by_their_samples():
    together = parwrap.distributed(uneven="join")(parwrap.sync_bn(joined))()
    with alone(), pytest.MonkeyPatch.context() as patched:  # the batch of both ranks
        init = DataLoader.__init__
        patched.setattr(DataLoader, "__init__", lambda self, data, batch_size: init(self, data, batch_size=8))
        expected = joined()

    assert_same(expected, together, 1e-10)


@pytest.mark.ranks(2)
def test_autocast():
    def under_autocast(**case):
        with torch.autocast("cpu", torch.bfloat16):
            return trained(dtype=torch.float32, **case)

    streams = torch.get_rng_state()
    together = parwrap.distributed(batch="global")(parwrap.sync_bn(under_autocast))()
    torch.set_rng_state(streams)
    with alone():
        expected = under_autocast()

    assert_same(expected, together, 5e-2)


@pytest.mark.ranks(2, fresh=True)
def test_a_rank_that_raises_ends_the_wait_of_another_in_a_batch_norm():
    @parwrap.distributed
    @parwrap.sync_bn
    def train():
        model = build(nn.BatchNorm1d, torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            if parwrap.rank() == 1 and step == 2:
                raise ValueError("odd")
            optimizer.zero_grad()
            model(torch.randn(6, 3)).mean().backward()
            optimizer.step()

    begin = time.monotonic()
    error, text = (ValueError, "odd") if parwrap.rank() else (parwrap.LockstepError, "rank 1 has raised")
    with pytest.raises(error, match=text):
        train()

    assert time.monotonic() - begin < 10
