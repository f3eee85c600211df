"""``batch="per_rank"`` is bit for bit hand-written DDP that reads the same samples."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from drawn_order import DrawnOrder
from parwrap.checks.same_step import NUMBERS

SEED = 3


def dataset(samples=48):
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(samples, 6, generator=generator), torch.randint(3, (samples,), generator=generator))


def made(build):
    torch.manual_seed(0)
    return build()


def equal(model, by_hand):
    theirs = by_hand.module if isinstance(by_hand, DistributedDataParallel) else by_hand
    return {name: torch.equal(p, q) for (name, p), q in zip(model.named_parameters(), theirs.parameters(), strict=True)}


def trained(model, step, loader, epochs=2, lr=0.1):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for _ in range(epochs):
        for number, (x, y) in enumerate(loader):
            step(model, optimizer, x, y, number)


def plain_step(model, optimizer, x, y, number):
    optimizer.zero_grad()
    functional.cross_entropy(model(x), y).backward()
    optimizer.step()


def against_ddp(model, step=plain_step, by_hand_step=None, **options):
    """Which parameters of ``model`` are those that hand-written DDP trains."""
    by_hand = DistributedDataParallel(copy.deepcopy(model), **options)
    data, rank = dataset(), parwrap.rank()

    @parwrap.distributed(seed=SEED)
    def train():
        trained(model, step, DataLoader(data, batch_size=4, shuffle=True))

    train()
    torch.manual_seed(SEED + rank)  # what a rank draws inside of its training passes
    sampler = DrawnOrder(data, seed=SEED)
    loader = DataLoader(data, batch_size=4, sampler=sampler, generator=torch.Generator())
    trained(by_hand, by_hand_step or step, loader)
    return equal(model, by_hand)


class Branching(nn.Module):
    """One head of two by the number of the step, and a layer that is never used."""

    def __init__(self):
        super().__init__()
        self.body, self.heads, self.never = nn.Linear(6, 8), nn.ModuleList(nn.Linear(8, 3) for _ in range(2)), nn.Linear(2, 2)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.heads[self.calls % 2](self.body(x).relu())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.second(self.first(self.body(x)).relu()))


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.reentrant = reentrant

    def forward(self, x):
        x = checkpoint(lambda x: self.second(self.first(x).relu()), x.requires_grad_(), use_reentrant=self.reentrant)
        return self.head(x)


class CheckpointedTwice(Checkpointed):
    """A layer in two checkpoints gets its gradient in two parts."""

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(lambda x: self.second(x).relu(), x, use_reentrant=self.reentrant)
        return self.head(x)


class Double(nn.Module):
    def forward(self, x):
        return x.double()


def mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


MODELS = {
    "mlp": mlp,
    "batch norm": lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)),
    "dropout": lambda: nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5), nn.Linear(32, 3)),
    "tied weights": Tied,
    "float64": lambda: nn.Sequential(Double(), mlp().double()),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", MODELS)
def test_a_plain_step(name):
    assert set(against_ddp(made(MODELS[name])).values()) == {True}


@pytest.mark.ranks(2)
def test_unused_and_branching_parameters_keep_none():
    model = made(Branching)

    def step(model, optimizer, x, y, number):
        plain_step(model, optimizer, x, y, number)
        module = getattr(model, "module", model)

        assert all(p.grad is None for p in module.never.parameters())
        assert [head.weight.grad is not None for head in module.heads] == [module.calls % 2 == index for index in range(2)]

    assert set(against_ddp(model, step, find_unused_parameters=True).values()) == {True}


class Uncheckpointed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        if isinstance(self.inner, CheckpointedTwice):
            return self.inner.head(self.inner.second(self.inner.second(self.inner.first(x)).relu()).relu())
        return self.inner.head(self.inner.second(self.inner.first(x).relu()))


@pytest.mark.ranks(2, fresh=True)  # the first checkpoint of a process sets torch's default device type
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", [Checkpointed, CheckpointedTwice])
def test_checkpoints_equal_the_same_layers_without_them(kind, reentrant):
    model, data = made(lambda: kind(reentrant)), dataset()
    by_hand = DistributedDataParallel(Uncheckpointed(copy.deepcopy(model)))
    parwrap.distributed(seed=SEED)(lambda: trained(model, plain_step, DataLoader(data, batch_size=4, shuffle=True)))()
    trained(by_hand, plain_step, DataLoader(data, batch_size=4, sampler=DrawnOrder(data, seed=SEED)))

    assert set(equal(model, by_hand.module.inner).values()) == {True}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("no_sync", [False, True])
def test_accumulation_by_hand(no_sync):
    model = made(mlp)

    def step(model, optimizer, x, y, number):
        inner = model.no_sync if isinstance(model, DistributedDataParallel) else parwrap.no_sync
        with inner() if no_sync and number % 2 == 0 else nullcontext():
            (functional.cross_entropy(model(x), y) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()

    assert set(against_ddp(model, step).values()) == {True}


@pytest.mark.ranks(2)
def test_a_gan_with_two_optimizers():
    def build():
        return nn.ModuleDict(
            {
                "g": nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 6)),
                "d": nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)),
            }
        )

    def train(g, d, loader):
        optimizers = torch.optim.Adam(g.parameters(), lr=0.01), torch.optim.Adam(d.parameters(), lr=0.01)
        for real, _ in loader:
            fake = g(real[:, :2])
            optimizers[1].zero_grad()
            loss = functional.softplus(-d(real)).mean() + functional.softplus(d(fake.detach())).mean()
            loss.backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            functional.softplus(-d(fake)).mean().backward()
            optimizers[0].step()

    models, data = made(build), dataset()
    copies = copy.deepcopy(models)
    by_hand = {name: DistributedDataParallel(copies[name], broadcast_buffers=False) for name in ("g", "d")}
    parwrap.distributed(seed=SEED)(lambda: train(models["g"], models["d"], DataLoader(data, batch_size=4, shuffle=True)))()
    train(by_hand["g"], by_hand["d"], DataLoader(data, batch_size=4, sampler=DrawnOrder(data, seed=SEED)))

    assert set(equal(models, copies).values()) == {True}


@pytest.mark.ranks(2, fresh=True)  # the compiler keeps threads and caches
def test_a_model_compiled_by_torch():
    model = made(mlp)
    by_hand = DistributedDataParallel(copy.deepcopy(model))
    data = dataset()
    compiled = torch.compile(model, backend="aot_eager")
    parwrap.distributed(seed=SEED)(lambda: trained(compiled, plain_step, DataLoader(data, batch_size=4, shuffle=True)))()
    trained(by_hand, plain_step, DataLoader(data, batch_size=4, sampler=DrawnOrder(data, seed=SEED)))

    assert set(equal(model, by_hand).values()) == {True}


@pytest.mark.ranks(3)
def test_three_ranks_equal_ddp_with_one_more_small_parameter():
    model, data = made(mlp), dataset()
    by_hand = DistributedDataParallel(WithSignal(copy.deepcopy(model)))
    parwrap.distributed(seed=SEED)(lambda: trained(model, plain_step, DataLoader(data, batch_size=4, shuffle=True)))()
    trained(by_hand, plain_step, DataLoader(data, batch_size=4, sampler=DrawnOrder(data, seed=SEED)))

    assert set(equal(model, by_hand.module.inner).values()) == {True}


class WithSignal(nn.Module):
    """The model beside one parameter as large as parwrap's signal: a bit for each of its 4 tensors, and 15 numbers."""

    def __init__(self, inner):
        super().__init__()
        self.signal = nn.Parameter(torch.zeros(4 + NUMBERS))
        self.inner = inner

    def forward(self, x):
        return self.inner(x + 0 * self.signal.sum())  # used first, so its gradient comes last
