"""Unbalanced classes, evened out by a WeightedRandomSampler."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler


def make_weights_for_balanced_classes(labels, nclasses):
    count = torch.bincount(labels, minlength=nclasses).float()
    return (1.0 / count)[labels]


def make_data(per_class):
    centers = torch.tensor([[1.5, 0.0], [-1.0, 1.0], [-1.0, -1.0]])
    y = torch.repeat_interleave(torch.arange(3), torch.tensor(per_class))
    return centers[y] + 0.5 * torch.randn(len(y), 2), y


def main():
    torch.manual_seed(3)
    X_train, y_train = make_data([500, 60, 40])
    X_test, y_test = make_data([100, 100, 100])

    weights = make_weights_for_balanced_classes(y_train, 3)
    sampler = WeightedRandomSampler(weights, len(weights))
    train_loader = DataLoader(TensorDataset(X_train, y_train), batch_size=20, sampler=sampler, drop_last=True)

    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5 * len(train_loader), gamma=0.5)
    seen = torch.zeros(3)
    for epoch in range(4):
        for X, y in train_loader:
            loss = nn.functional.cross_entropy(model(X), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            seen += torch.bincount(y, minlength=3)
    assert seen.min() > 0.7 * seen.max(), seen

    with torch.no_grad():
        accuracy = (model(X_test).argmax(1) == y_test).float().mean().item()
    print(f"accuracy {accuracy:.4f}")
    return model


if __name__ == "__main__":
    model = main()
