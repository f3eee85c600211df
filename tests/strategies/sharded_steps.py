"""A loop whose steps are sharded, and optimizers for it."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Renamed(torch.optim.AdamW):
    """A subclass with a constructor and a step of its own."""

    def __init__(self, parameters, rate):
        super().__init__(parameters, lr=rate, weight_decay=0.1)

    def step(self, closure=None):
        self.counted = getattr(self, "counted", 0) + 1
        return super().step(closure)


def model_of(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


DATA = TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(1)), torch.ones(24, 1))


def train(make, epochs=2, model=None, clip=None, schedule=True):
    model = model or model_of()
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) if schedule else None
    for _ in range(epochs):
        for x, y in DataLoader(DATA, batch_size=2, shuffle=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
        if scheduler:
            scheduler.step()
    return model, optimizer


def alike(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))
