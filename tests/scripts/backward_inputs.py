"""Two losses in one call of autograd.backward, and backward(inputs=...) for a part of the model only."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def blobs(n, dim=10, classes=4, seed=3):
    g = torch.Generator().manual_seed(seed)
    centers = 1.5 * torch.randn(classes, dim, generator=g)
    y = torch.randint(classes, (n,), generator=g)
    return centers[y] + 0.7 * torch.randn(n, dim, generator=g), y


x, y = blobs(780, seed=13)
model = nn.ModuleDict({"body": nn.Linear(10, 32), "head": nn.Linear(32, 4), "side": nn.Linear(32, 10)})
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(2):
    for xb, yb in DataLoader(TensorDataset(x[:480], y[:480]), batch_size=30, shuffle=True):
        hidden = F.relu(model["body"](xb))
        classified, rebuilt = F.cross_entropy(model["head"](hidden), yb), F.mse_loss(model["side"](hidden), xb)
        optimizer.zero_grad()
        torch.autograd.backward([classified, 0.1 * rebuilt], retain_graph=True)
        rebuilt.backward(inputs=list(model["side"].parameters()))
        optimizer.step()
with torch.no_grad():
    right = model["head"](F.relu(model["body"](x[480:]))).argmax(1) == y[480:]
print(f"accuracy {right.float().mean():.4f}")
