"""Stochastic depth: each residual block is skipped at random, so every step trains other layers."""

import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def blobs(n, dim=10, classes=4, seed=3):
    g = torch.Generator().manual_seed(seed)
    centers = 1.5 * torch.randn(classes, dim, generator=g)
    y = torch.randint(classes, (n,), generator=g)
    return centers[y] + 0.7 * torch.randn(n, dim, generator=g), y


class Net(nn.Module):
    def __init__(self, drop=0.5):
        super().__init__()
        self.drop = drop
        self.stem = nn.Linear(10, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)) for _ in range(4))
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            if self.training and random.random() < self.drop:
                continue
            x = x + block(x) * (1 if self.training else 1 - self.drop)
        return self.head(F.relu(x))


x, y = blobs(1200)
train = DataLoader(TensorDataset(x[:900], y[:900]), batch_size=25, shuffle=True)
model = Net()
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
for epoch in range(2):
    model.train()
    for xb, yb in train:
        opt.zero_grad()
        F.cross_entropy(model(xb), yb).backward()
        opt.step()
model.eval()
with torch.no_grad():
    print(f"accuracy {(model(x[900:]).argmax(1) == y[900:]).float().mean():.4f}")
