"""Trains a part, then more of the model with another optimizer and another loss, each until a batch is good enough."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def blobs(n, dim=10, classes=4, seed=3):
    g = torch.Generator().manual_seed(seed)
    centers = 1.5 * torch.randn(classes, dim, generator=g)
    y = torch.randint(classes, (n,), generator=g)
    return centers[y] + 0.7 * torch.randn(n, dim, generator=g), y


def train_until(good, model, parameters, loader, most=6):
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for epoch in range(most):
        for step, (xb, yb) in enumerate(loader):
            loss = F.cross_entropy(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            if step % 7 == 3:
                (1e-3 * model(xb).square().mean()).backward()
            optimizer.step()
            if step > 2 and loss.item() < good:
                return


x, y = blobs(1200, seed=23)
loader = DataLoader(TensorDataset(x[:900], y[:900]), batch_size=20, shuffle=True)
first, second, head = nn.Linear(10, 32), nn.Linear(32, 32), nn.Linear(32, 4)
train_until(0.6, nn.Sequential(first, nn.ReLU(), head), [*first.parameters(), *head.parameters()], loader)
model = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), head)
train_until(0.2, model, [*second.parameters(), *head.parameters()], loader)
train_until(0.1, model, model.parameters(), loader)
with torch.no_grad():
    print(f"accuracy {(model(x[900:]).argmax(1) == y[900:]).float().mean():.4f}")
