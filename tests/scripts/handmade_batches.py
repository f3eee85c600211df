"""Batches cut by hand from a permutation, with no DataLoader."""

import numpy as np
import torch
from torch import nn

rng = np.random.RandomState(42)
centers = 3 * rng.randn(5, 8)
y_data = rng.randint(0, 5, size=900)
x_data = centers[y_data] + 1.5 * rng.randn(900, 8)

x_train = torch.from_numpy(x_data[:600]).float()
y_train = torch.from_numpy(y_data[:600]).long()
x_test = torch.from_numpy(x_data[600:]).float()
y_test = torch.from_numpy(y_data[600:]).long()

torch.manual_seed(42)
batch_size = 32
n_epochs = 3

model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 5))
loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for epoch in range(n_epochs):
    model.train()
    permutation = torch.randperm(x_train.size(0))
    for i in range(0, x_train.size(0), batch_size):
        indices = permutation[i : i + batch_size]
        batch_x, batch_y = x_train[indices], y_train[indices]

        optimizer.zero_grad()
        loss = loss_fn(model(batch_x), batch_y)
        loss.backward()
        optimizer.step()

    model.eval()
    with torch.no_grad():
        acc = (model(x_test).argmax(1) == y_test).float().mean().item()
    print(f"Epoch {epoch}, validation: {acc:.3f}")

print("accuracy", round(acc, 4))
