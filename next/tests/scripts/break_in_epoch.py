"""Leaves an epoch as soon as a batch is good enough, then evaluates, saves and goes on with the next epoch."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def blobs(n, dim=10, classes=4, seed=3):
    g = torch.Generator().manual_seed(seed)
    centers = 1.5 * torch.randn(classes, dim, generator=g)
    y = torch.randint(classes, (n,), generator=g)
    return centers[y] + 0.7 * torch.randn(n, dim, generator=g), y


x, y = blobs(1300, seed=5)
train = DataLoader(TensorDataset(x[:1000], y[:1000]), batch_size=10, shuffle=True)
model = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
opt = torch.optim.Adam(model.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0)

for epoch in range(4):
    model.train()
    for step, (xb, yb) in enumerate(train):
        opt.zero_grad()
        loss = F.cross_entropy(model(xb), yb)
        loss.backward()
        opt.step()
        if step >= 5 and loss.item() < 0.25:
            break
    model.eval()
    with torch.no_grad():
        valid = F.cross_entropy(model(x[1000:]), y[1000:]).item()
        accuracy = (model(x[1000:]).argmax(1) == y[1000:]).float().mean().item()
    scheduler.step(valid)
    torch.save(model.state_dict(), "last.pt")
    print(f"epoch {epoch}: {step + 1} steps, {valid:.3f}")

model.load_state_dict(torch.load("last.pt"))
print(f"accuracy {accuracy:.4f}")
