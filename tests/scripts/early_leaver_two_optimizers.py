"""Two networks with an optimizer each; each stops to learn by its own loss, and the function returns when both have."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def blobs(n, dim=10, classes=4, seed=3):
    g = torch.Generator().manual_seed(seed)
    centers = 1.5 * torch.randn(classes, dim, generator=g)
    y = torch.randint(classes, (n,), generator=g)
    return centers[y] + 0.7 * torch.randn(n, dim, generator=g), y


def train(encoder, head, loader, patience=60):
    first = torch.optim.Adam(encoder.parameters(), lr=2e-3)
    second = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
    good = 0
    while True:
        for xb, yb in loader:
            loss = F.cross_entropy(head(F.relu(encoder(xb))), yb)
            first.zero_grad()
            second.zero_grad()
            loss.backward()
            first.step()
            second.step()
            good = good + (loss.item() < 0.4)
            if good >= patience:
                return


x, y = blobs(1200, seed=7)
encoder, head = nn.Linear(10, 32), nn.Linear(32, 4)
model = nn.Sequential(encoder, nn.ReLU(), head)
train(encoder, head, DataLoader(TensorDataset(x[:900], y[:900]), batch_size=30, shuffle=True))
with torch.no_grad():
    print(f"accuracy {(model(x[900:]).argmax(1) == y[900:]).float().mean():.4f}")
