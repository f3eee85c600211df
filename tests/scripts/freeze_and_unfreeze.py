"""Fine-tuning: the backbone is frozen at first and trained from epoch 2 on, and set to eval as long as it is frozen."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def blobs(n, dim=10, classes=4, seed=3):
    g = torch.Generator().manual_seed(seed)
    centers = 1.5 * torch.randn(classes, dim, generator=g)
    y = torch.randint(classes, (n,), generator=g)
    return centers[y] + 0.7 * torch.randn(n, dim, generator=g), y


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU())
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.backbone(x))


x, y = blobs(1200, seed=9)
train = DataLoader(TensorDataset(x[:900], y[:900]), batch_size=45, shuffle=True)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(5):
    frozen = epoch < 2
    for p in model.backbone.parameters():
        p.requires_grad = not frozen
    model.train()
    if frozen:
        model.backbone.eval()
    for xb, yb in train:
        optimizer.zero_grad()
        F.cross_entropy(model(xb), yb).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        accuracy = (model(x[900:]).argmax(1) == y[900:]).float().mean().item()
    if epoch == 3:
        for p in model.head.parameters():
            p.requires_grad_(False)
print(f"accuracy {accuracy:.4f}")
