"""Models whose forward reads buffers that training changes, and the same loop under hand-written DDP and under parwrap."""

import copy

import torch
from torch import nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver
from torch.nn.functional import one_hot
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import parwrap


class Codes(nn.Module):
    """A codebook by exponential moving averages; with ``data``, updated as many public scripts do it."""

    def __init__(self, data=False):
        super().__init__()
        self.data = data
        self.register_buffer("embed", torch.randn(6, 4))
        self.register_buffer("sizes", torch.ones(6))
        self.register_buffer("sums", self.embed.clone())

    def forward(self, x):
        nearest = torch.cdist(x, self.embed).argmin(1)
        if self.training:
            with torch.no_grad():
                hot = one_hot(nearest, 6).to(x)
                sizes, sums = (self.sizes.data, self.sums.data) if self.data else (self.sizes, self.sums)
                sizes.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                sums.mul_(0.9).add_(hot.t() @ x, alpha=0.1)
                (self.embed.data if self.data else self.embed).copy_(self.sums / (self.sizes + 1e-3)[:, None])
        codes = self.embed[nearest]
        return x + (codes - x).detach(), (x - codes.detach()).square().mean()


class Normalizer(nn.Module):
    """Running mean and variance that it reads in training; with ``replaces``, in new tensors each time."""

    def __init__(self, replaces=False):
        super().__init__()
        self.replaces = replaces
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x):
        if self.training:
            if self.replaces:
                self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
                self.var = 0.9 * self.var + 0.1 * x.detach().var(0)
            else:
                self.mean.lerp_(x.detach().mean(0), 0.1)
                self.var.lerp_(x.detach().var(0), 0.1)
        return (x - self.mean) / (self.var + 1e-5).sqrt()


class VQVAE(nn.Module):
    def __init__(self, data=False):
        super().__init__()
        self.encoder, self.codes, self.decoder = nn.Linear(4, 4), Codes(data), nn.Linear(4, 4)

    def forward(self, x):
        out, commitment = self.codes(self.encoder(x))
        return (self.decoder(out) - x).square().mean() + commitment


class Normalized(nn.Module):
    def __init__(self, replaces=False, norm=False):
        super().__init__()
        self.first, self.normalizer, self.last = nn.Linear(4, 4), Normalizer(replaces), nn.Linear(4, 1)
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        return (self.last(self.norm(self.normalizer(self.first(x * self.scale)))).squeeze(1) - x.sum(1)).square().mean()


class Quantized(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        self.fake = FakeQuantize(observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255)

    def forward(self, x):
        return (self.last(self.fake(self.first(x).relu())).squeeze(1) - x.sum(1)).square().mean()


MODELS = {
    "VQ-VAE": VQVAE,
    "VQ-VAE by .data": lambda: VQVAE(data=True),
    "normalizer": Normalized,
    "normalizer that replaces": lambda: Normalized(replaces=True),
    "normalizer and batch norm": lambda: Normalized(norm=True),
    "quantized": Quantized,
}


def loader(samples=48, **options):
    generator = torch.Generator().manual_seed(5)
    return DataLoader(TensorDataset(torch.randn(samples, 4, generator=generator)), batch_size=4, **options)


def built(kind):
    torch.manual_seed(3)
    return MODELS[kind]()


def by_hand(kind, epochs=2, wrap=lambda model: model):
    """The state after training with ``DistributedDataParallel``."""
    model = built(kind)
    ddp = DistributedDataParallel(wrap(model), broadcast_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = loader().dataset
    for epoch in range(epochs):
        sampler = DistributedSampler(data, shuffle=False)
        sampler.set_epoch(epoch)
        for (x,) in DataLoader(data, batch_size=4, sampler=sampler):
            optimizer.zero_grad()
            ddp(x).backward()
            optimizer.step()
    return copy.deepcopy(model.state_dict())


def plain(kind, epochs=2, wrap=lambda model: model, **options):
    """The state after a plain loop under parwrap."""
    with parwrap.distributed(**options):
        model = built(kind)
        wrapped = wrap(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for _ in range(epochs):
            for (x,) in loader():
                optimizer.zero_grad()
                wrapped(x).backward()
                optimizer.step()
        return copy.deepcopy(model.state_dict())
