"""Every epoch's checkpoint goes into an open file, and the best one is copied; both are loaded again."""

import os
import shutil

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
os.makedirs("checkpoints/best")

means = 2.5 * torch.randn(3, 5)


def dataset(n):
    labels = torch.randint(3, (n,))
    return TensorDataset(means[labels] + torch.randn(n, 5), labels)


train_loader = DataLoader(dataset(400), batch_size=40, shuffle=True)
val_loader = DataLoader(dataset(300), batch_size=100)
model = nn.Sequential(nn.Linear(5, 24), nn.ReLU(), nn.Linear(24, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)


def evaluate():
    model.eval()
    with torch.no_grad():
        correct = sum((model(x).argmax(1) == y).sum().item() for x, y in val_loader)
    model.train()
    return correct / len(val_loader.dataset)


best = -1
for epoch in range(5):
    for x, y in train_loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    acc = evaluate()
    path = f"checkpoints/epoch{epoch}.pth"
    with open(path, "wb") as f:
        torch.save({"epoch": epoch, "acc": acc, "model": model.state_dict()}, f)
    with open(path, "rb") as f:
        model.load_state_dict(torch.load(f)["model"])
    if acc > best:
        best = acc
        shutil.copy(path, "checkpoints/best/model.pth")

checkpoint = torch.load("checkpoints/best/model.pth")
assert checkpoint["acc"] == best
assert sorted(os.listdir("checkpoints")) == ["best"] + [f"epoch{i}.pth" for i in range(5)]
model.load_state_dict(checkpoint["model"])
assert evaluate() == best
print(f"accuracy {best:.4f}")
