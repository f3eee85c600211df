"""Re-entrant activation checkpointing, one checkpoint within another, and a layer that is used in two of them."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset


def blobs(n, dim=10, classes=4, seed=3):
    g = torch.Generator().manual_seed(seed)
    centers = 1.5 * torch.randn(classes, dim, generator=g)
    y = torch.randint(classes, (n,), generator=g)
    return centers[y] + 0.7 * torch.randn(n, dim, generator=g), y


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(10, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(3))
        self.shared = nn.Linear(32, 32)
        self.head = nn.Linear(32, 4)

    def pair(self, x):
        x = checkpoint(self.blocks[0], x, use_reentrant=True)
        return checkpoint(self.blocks[1], self.shared(x), use_reentrant=True)

    def forward(self, x):
        x = F.relu(self.stem(x))
        x = checkpoint(self.pair, x, use_reentrant=True)
        x = checkpoint(lambda x: self.shared(self.blocks[2](x)), x, use_reentrant=True)
        return self.head(x)


x, y = blobs(1200)
train = DataLoader(TensorDataset(x[:900], y[:900]), batch_size=30, shuffle=True)
model = Net()
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
for epoch in range(2):
    for xb, yb in train:
        opt.zero_grad()
        F.cross_entropy(model(xb), yb).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
with torch.no_grad():
    print(f"accuracy {(model(x[900:]).argmax(1) == y[900:]).float().mean():.4f}")
