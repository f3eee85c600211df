"""Gradient accumulation written by the user: a step every few backwards and at the end of the epoch."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
accum_iter = 4
batch_size = 8

directions = F.normalize(torch.randn(6, 15), dim=1)
labels = torch.randint(6, (904,))
inputs = 3 * directions[labels] + 0.7 * torch.randn(904, 15)
train_loader = DataLoader(TensorDataset(inputs[:504], labels[:504]), batch_size=batch_size, shuffle=True)
test_loader = DataLoader(TensorDataset(inputs[504:], labels[504:]), batch_size=batch_size)

model = nn.Sequential(nn.Linear(15, 48), nn.ReLU(), nn.Linear(48, 6))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

for epoch in range(2):
    model.train()
    optimizer.zero_grad()
    for batch_idx, (x, y) in enumerate(train_loader):
        loss = F.cross_entropy(model(x), y)
        # normalize loss to account for batch accumulation
        loss = loss / accum_iter
        loss.backward()

        # weights update
        if ((batch_idx + 1) % accum_iter == 0) or (batch_idx + 1 == len(train_loader)):
            optimizer.step()
            optimizer.zero_grad()
    print(f"epoch {epoch}, last loss {loss.item() * accum_iter:.4f}")

model.eval()
correct = total = 0
with torch.no_grad():
    for x, y in test_loader:
        correct += (model(x).argmax(dim=1) == y).sum().item()
        total += y.size(0)
print(f"accuracy {correct / total:.4f}")
