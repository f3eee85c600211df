"""Changes its mind while it trains: a model cast to double after the first epoch, then another layer for the optimizer."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def blobs(n, dim=10, classes=4, seed=3):
    g = torch.Generator().manual_seed(seed)
    centers = 1.5 * torch.randn(classes, dim, generator=g)
    y = torch.randint(classes, (n,), generator=g)
    return centers[y] + 0.7 * torch.randn(n, dim, generator=g), y


x, y = blobs(780, seed=15)
body, head = nn.Sequential(nn.Linear(10, 32), nn.ReLU()), nn.Linear(32, 4)
model = nn.Sequential(body, head)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(4):
    if epoch == 1:
        model.double()
    if epoch == 2:
        extra = nn.Sequential(nn.Linear(32, 32), nn.ReLU()).double()
        model.insert(1, extra)
        optimizer.add_param_group({"params": extra.parameters(), "lr": 0.05})
    if epoch == 3:
        extra.float()  # parameters of both dtypes in one backward
        extra[0].register_forward_pre_hook(lambda module, inputs: (inputs[0].float(),))
        extra.register_forward_hook(lambda module, inputs, output: output.double())
    for xb, yb in DataLoader(TensorDataset(x[:480], y[:480]), batch_size=30, shuffle=True):
        optimizer.zero_grad()
        F.cross_entropy(model(xb.to(head.weight.dtype)), yb).backward()
        optimizer.step()
with torch.no_grad():
    print(f"accuracy {(model(x[480:].double()).argmax(1) == y[480:]).float().mean():.4f}")
