"""Thirty-two training functions with one planted defect each: ``parwrap.verify`` names it as the first reason."""

import os
import random
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import parwrap

pytestmark = pytest.mark.slow

SUM = "the loss is a sum over the samples"
OTHER_DIVISOR = "the loss is divided by a number other than that of its samples"
NO_MEAN = "the loss is not a mean over samples"
OWN_START = "the weights differ before anything is trained"
DECIDES = "the runs take different branches: a number that was computed from a share"
CAME_APART = "LockstepError: the ranks have come apart"
OTHER_OPTIONS = "the options of the optimizers differ between rank 0 and rank 1"
OTHER_ORDER = "the ranks have read the samples in different orders"
OTHER_WEIGHTS = "a rank has changed it by numbers that no backward averaged"
TRAINS_AT_RANDOM = "the batch trains with random numbers (dropout, noise)"
READS_AT_RANDOM = "samples are drawn at random while they are read (augmentation)"


def data(seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 4, generator=g)
    return TensorDataset(x, (x[:, :1] + 0.3 * x[:, 1:2] > 0).float(), (torch.rand(64, 1, generator=g) > 0.4).float())


def fit(loss_of=None, model=None, loader=None, after=None, optimizer=torch.optim.SGD, epochs=2):
    """A plain loop with a hole for a defect."""
    model = model or nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = optimizer(model.parameters(), lr=0.05)
    for _ in range(epochs):
        for x, y, kept in loader or DataLoader(data(), batch_size=8, shuffle=True):
            optimizer.zero_grad()
            out = model(x)
            loss = (loss_of or (lambda out, y, kept: (out - y).square().mean()))(out, y, kept)
            loss.backward()
            optimizer.step()
            if after and after(loss, out, y, optimizer, model):
                break


# wrong divisors


def squares(out, y):
    return (out - y).square()


def masked(out, y, kept):
    return (squares(out, y) * kept).sum() / kept.sum()


def contrast(out, y, kept):
    return F.cross_entropy(out @ out.t(), torch.arange(len(out)))


def variance(out, y, kept):
    return squares(out, y).mean() + out.var()


def ranked(out, y, kept):
    return F.margin_ranking_loss(out[:-1], out[1:], torch.sign(y[:-1] - y[1:]))


class OwnNorm(nn.Module):
    """Normalizes by the batch, written by hand."""

    def forward(self, x):
        return (x - x.mean(0)) / (x.std(0) + 1e-5)


class BatchDependent(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x):
        return self.one(x) if x.sum() > 0 else self.other(x)


class Noisy(nn.Module):
    def forward(self, x):
        return x + 0.1 * torch.randn_like(x)


class NumpyNoise(nn.Module):
    def forward(self, x):
        return x * float(np.random.uniform(0.5, 1.5))


class Augmented(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        x, y, kept = self.plain[index]
        return x + self.noise(), y, kept

    def __init__(self, noise):
        self.plain, self.noise = data(), noise


def layers(*inner):
    return nn.Sequential(nn.Linear(4, 8), *inner, nn.Linear(8, 1))


def correct(out, y):
    return ((out > 0.5) == (y > 0.5)).sum().item()


def sets_rate(loss, out, y, optimizer, model):
    optimizer.param_groups[0]["lr"] = 0.01 * (1 + correct(out, y))


def sets_momentum(loss, out, y, optimizer, model):
    optimizer.param_groups[0]["momentum"] = min(0.9, correct(out, y) / 20)


def stops(loss, out, y, optimizer, model):
    return correct(out, y) >= 3


def skips_by_rank(loss, out, y, optimizer, model):
    return float(out.detach().sum()) > 0


def shifts_by_share(loss, out, y, optimizer, model):
    with torch.no_grad():
        model[0].bias += 0.001 * out.detach().sum()


def clips_by_share(loss, out, y, optimizer, model):
    with torch.no_grad():
        model[-1].weight.mul_(1 - 0.01 * correct(out, y))


def seeded_by(seed):
    def train():
        torch.manual_seed(seed())
        fit()

    return train


def starts_from_urandom():
    model = layers(nn.Tanh())
    with torch.no_grad():
        model[0].weight[0, 0] = int.from_bytes(os.urandom(4), "big") / 2**31
    fit(model=model)


def starts_from_numpys_fresh_generator():
    model = layers(nn.Tanh())
    with torch.no_grad():
        model[0].weight.copy_(torch.from_numpy(np.random.Generator(np.random.PCG64()).normal(size=(8, 4))))
    fit(model=model)


def starts_by_rank():
    torch.manual_seed(parwrap.rank() + 10 * parwrap.world_size())
    fit()


def splits_by_itself():
    order = np.random.Generator(np.random.PCG64()).permutation(64)
    fit(loader=DataLoader(torch.utils.data.Subset(data(), order[:48].tolist()), batch_size=8))


def shuffles_by_time():
    fit(loader=DataLoader(data(), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(time.time_ns() % 2**31)))


DEFECTS = {
    "a sum": (SUM, lambda: fit(lambda out, y, kept: squares(out, y).sum() / 50)),
    "reduction='sum'": (SUM, lambda: fit(lambda out, y, kept: 0.01 * F.mse_loss(out, y, reduction="sum"))),
    "divided by batch_size": (SUM, lambda: fit(lambda out, y, kept: squares(out, y).sum() / 8)),
    "divided by the root of the batch": (OTHER_DIVISOR, lambda: fit(lambda out, y, kept: squares(out, y).sum() / len(out) ** 0.5)),
    "divided by n - 1": (OTHER_DIVISOR, lambda: fit(lambda out, y, kept: squares(out, y).sum() / (len(out) - 1))),
    "a mean times the batch squared": (OTHER_DIVISOR, lambda: fit(lambda out, y, kept: squares(out, y).mean() * len(out) ** 2 / 64)),
    "a masked mean": (NO_MEAN, lambda: fit(masked)),
    "in-batch negatives": (NO_MEAN, lambda: fit(contrast)),
    "the variance of the batch": (NO_MEAN, lambda: fit(variance)),
    "neighbours in the batch": ((NO_MEAN, OTHER_DIVISOR), lambda: fit(ranked)),
    "a norm by hand": (NO_MEAN, lambda: fit(model=layers(OwnNorm()))),
    "a way that the batch decides": (NO_MEAN, lambda: fit(model=BatchDependent())),
    "dropout": (TRAINS_AT_RANDOM, lambda: fit(model=layers(nn.Dropout(0.2)))),
    "noise": (TRAINS_AT_RANDOM, lambda: fit(model=layers(Noisy()))),
    "noise of numpy": (TRAINS_AT_RANDOM, lambda: fit(model=layers(NumpyNoise()))),
    "dropout in a recurrent network": (
        TRAINS_AT_RANDOM,
        lambda: fit(lambda out, y, kept: out[0].square().mean(), model=nn.LSTM(4, 3, num_layers=2, dropout=0.5)),
    ),
    "augmentation": (READS_AT_RANDOM, lambda: fit(loader=DataLoader(Augmented(lambda: 0.1 * torch.randn(4)), batch_size=8))),
    "augmentation of numpy": (
        READS_AT_RANDOM,
        lambda: fit(loader=DataLoader(Augmented(lambda: np.float32(np.random.normal())), batch_size=8)),
    ),
    "augmentation of random": (READS_AT_RANDOM, lambda: fit(loader=DataLoader(Augmented(lambda: random.gauss(0, 0.1)), batch_size=8))),
    "a learning rate of a share": (OTHER_OPTIONS, lambda: fit(after=sets_rate)),
    "a momentum of a share": (OTHER_OPTIONS, lambda: fit(after=sets_momentum)),
    "a stop by a share": ((CAME_APART, DECIDES), lambda: fit(after=stops, epochs=4)),
    "a skip by a share": ((CAME_APART, DECIDES), lambda: fit(after=skips_by_rank, epochs=4)),
    "weights shifted by a share": (OTHER_WEIGHTS, lambda: fit(after=shifts_by_share)),
    "weights shrunk by a share": (OTHER_WEIGHTS, lambda: fit(after=clips_by_share)),
    "a seed of the time": ((OWN_START, OTHER_ORDER), seeded_by(lambda: time.time_ns() % 2**31)),
    "a seed of the process": ((OWN_START, OTHER_ORDER), seeded_by(os.getpid)),
    "a start of urandom": (OWN_START, starts_from_urandom),
    "a start of a generator's own": (OWN_START, starts_from_numpys_fresh_generator),
    "a start by rank": ((OWN_START, OTHER_ORDER), starts_by_rank),
    "a split of a generator's own": (OTHER_ORDER, splits_by_itself),
    "an order of the time": (OTHER_ORDER, shuffles_by_time),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_the_first_reason_names_the_defect(name):
    expected, train = DEFECTS[name]

    result = parwrap.verify(train, steps=8)

    assert not result.equal
    reason = result.difference.reasons[0]
    assert any(each in reason for each in (expected if isinstance(expected, tuple) else (expected,))), reason


@pytest.mark.parametrize("dropout", [True, False])
def test_noise_is_not_answered_with_an_option_that_is_on(dropout):
    result = parwrap.verify(lambda: fit(model=layers(Noisy())), steps=2, dropout=dropout)

    assert dropout == ("--no-dropout" in result.difference.reasons[0])
