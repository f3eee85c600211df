"""Semi-supervised training on two loaders zipped together: few labeled samples, many unlabeled ones."""

from itertools import cycle

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
means = 2 * torch.randn(3, 8)


def sample(count):
    labels = torch.arange(count) % 3
    return means[labels] + torch.randn(count, 8), labels


def augment(x):
    return x + 0.3 * torch.randn_like(x)


x_labeled, y_labeled = sample(180)
x_unlabeled, _ = sample(1200)
x_test, y_test = sample(600)
labeled_loader = DataLoader(TensorDataset(x_labeled, y_labeled), batch_size=12, shuffle=True)
unlabeled_loader = DataLoader(TensorDataset(x_unlabeled), batch_size=24, shuffle=True)

model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

for epoch in range(3):
    model.train()
    for (x_l, y_l), (x_u,) in zip(cycle(labeled_loader), unlabeled_loader):
        with torch.no_grad():
            probs, pseudo_labels = torch.softmax(model(augment(x_u)), dim=1).max(dim=1)
        mask = (probs > 0.9).float()
        supervised_loss = F.cross_entropy(model(x_l), y_l)
        unsupervised_loss = (F.cross_entropy(model(augment(x_u)), pseudo_labels, reduction="none") * mask).mean()
        loss = supervised_loss + 0.5 * unsupervised_loss

        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: supervised {supervised_loss.item():.4f} unsupervised {unsupervised_loss.item():.4f}")

model.eval()
with torch.no_grad():
    acc = (model(x_test).argmax(dim=1) == y_test).float().mean()
print(f"accuracy {acc.item():.4f}")
