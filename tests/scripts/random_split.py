"""random_split with no generator: the split hangs on the global random state, which nothing seeds."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, random_split


class PointsDataset(Dataset):
    def __init__(self, n_points=1500):
        rng = np.random.default_rng(0)
        self.points = rng.uniform(-1, 1, size=(n_points, 2)).astype(np.float32)
        self.labels = (self.points[:, 0] * self.points[:, 1] > 0).astype(np.int64)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, idx):
        return self.points[idx], self.labels[idx]


dataset = PointsDataset()
train_size = int(0.8 * len(dataset))
train_set, val_set = random_split(dataset, [train_size, len(dataset) - train_size])
train_loader = DataLoader(train_set, batch_size=32, shuffle=True)
val_loader = DataLoader(val_set, batch_size=64, shuffle=False)

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
criterion = nn.CrossEntropyLoss()

for epoch in range(2):
    model.train()
    for points, labels in train_loader:
        points, labels = points.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = criterion(model(points), labels)
        loss.backward()
        optimizer.step()

    model.eval()
    correct = 0
    with torch.no_grad():
        for points, labels in val_loader:
            points, labels = points.to(device), labels.to(device)
            correct += (model(points).argmax(1) == labels).sum().item()
    print(f"Epoch {epoch + 1}: validation accuracy {100 * correct / len(val_set):.1f} %")

print(f"accuracy {correct / len(val_set):.4f}")
