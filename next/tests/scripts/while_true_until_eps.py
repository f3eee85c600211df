"""Training until the loss of a batch is small enough, whenever that is."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
w = torch.randn(6, 1)
model = nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

steps = 0
while True:
    x = torch.randn(16, 6)
    y = x @ w + 0.3
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    steps += 1
    if loss.item() < 1e-3:
        break

print(f"done after {steps} steps")
x = torch.randn(500, 6)
print(f"loss {F.mse_loss(model(x), x @ w + 0.3).item():.5f}")
