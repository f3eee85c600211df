"""A model that goes one way or another by what is in the batch, through submodules that have nothing in common."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def blobs(n, dim=10, classes=4, seed=3):
    g = torch.Generator().manual_seed(seed)
    centers = 1.5 * torch.randn(classes, dim, generator=g)
    y = torch.randint(classes, (n,), generator=g)
    return centers[y] + 0.7 * torch.randn(n, dim, generator=g), y


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.ways = nn.ModuleList(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 4)) for _ in range(3))
        self.never = nn.Linear(3, 3)

    def forward(self, x):
        way = int(x.sum().abs().item() * 1000) % 3
        return self.ways[way](x)


x, y = blobs(1500)
train = DataLoader(TensorDataset(x[:1200], y[:1200]), batch_size=16, shuffle=True)
model = Routed()
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
for epoch in range(2):
    for xb, yb in train:
        opt.zero_grad()
        F.cross_entropy(model(xb), yb).backward()
        assert all(p.grad is None for p in model.never.parameters())
        opt.step()
with torch.no_grad():
    right = sum((way(x[1200:]).argmax(1) == y[1200:]).float().mean().item() for way in model.ways)
print(f"accuracy {right / 3:.4f}")
