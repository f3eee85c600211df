"""Every epoch trains on a Subset of its own: a fresh permutation from a numpy generator that nobody has seeded."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

EPOCHS, PER_EPOCH, BATCH = 12, 256, 16

torch.manual_seed(0)
rng = np.random.default_rng()
x = torch.rand(1024, 2) * 2 - 1
y = (x[:, 0] * x[:, 1] > 0).long()
train_set, val_set = TensorDataset(x[:800], y[:800]), TensorDataset(x[800:], y[800:])

model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2))
opt = torch.optim.Adam(model.parameters(), lr=2e-2)
for epoch in range(EPOCHS):
    model.train()
    subset = Subset(train_set, rng.permutation(len(train_set))[:PER_EPOCH])
    for xb, yb in DataLoader(subset, batch_size=BATCH, shuffle=True):
        loss = nn.functional.cross_entropy(model(xb), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
    model.eval()
    with torch.no_grad():
        acc = np.mean([(model(xb).argmax(1) == yb).float().mean().item() for xb, yb in DataLoader(val_set, batch_size=56)])
    print(f"epoch {epoch + 1:2d}  val acc {acc:.3f}")

print(f"accuracy {acc:.4f}")
