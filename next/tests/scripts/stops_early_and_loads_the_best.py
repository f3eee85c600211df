"""Early stopping by the loss of a batch, with the best weights of the run loaded again at the end."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def blobs(n, dim=10, classes=4, seed=3):
    g = torch.Generator().manual_seed(seed)
    centers = 1.5 * torch.randn(classes, dim, generator=g)
    y = torch.randint(classes, (n,), generator=g)
    return centers[y] + 0.7 * torch.randn(n, dim, generator=g), y


def fit(model, loader, epochs=8):
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    best = float("inf")
    for epoch in range(epochs):
        model.train()
        for xb, yb in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()
            if loss.item() < best:
                best = loss.item()
                torch.save(model.state_dict(), "best.pt")
            if best < 0.15:
                return


x, y = blobs(1200, seed=21)
model = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
fit(model, DataLoader(TensorDataset(x[:900], y[:900]), batch_size=15, shuffle=True))
model.load_state_dict(torch.load("best.pt"))
model.eval()
with torch.no_grad():
    print(f"accuracy {(model(x[900:]).argmax(1) == y[900:]).float().mean():.4f}")
