"""A shuffled DataLoader and an optimizer: the loop that most scripts are."""

import math

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset


def two_rings(count):
    labels = torch.randint(2, (count,))
    radius = 1.0 + labels + 0.15 * torch.randn(count)
    angle = 2 * math.pi * torch.rand(count)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), labels)


def train(model, device, loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        if batch_idx % 10 == 0:
            print(f"Train Epoch: {epoch} [{batch_idx}/{len(loader)}]\tLoss: {loss.item():.6f}")


def test(model, device, loader):
    model.eval()
    correct = 0
    with torch.no_grad():
        for data, target in loader:
            data, target = data.to(device), target.to(device)
            correct += (model(data).argmax(dim=1) == target).sum().item()
    return correct / len(loader.dataset)


def main():
    torch.manual_seed(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_loader = DataLoader(two_rings(500), batch_size=32, shuffle=True)
    test_loader = DataLoader(two_rings(500), batch_size=250)

    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
    optimizer = optim.Adam(model.parameters(), lr=0.02)
    for epoch in range(1, 5):
        train(model, device, train_loader, optimizer, epoch)
        accuracy = test(model, device, test_loader)
        print(f"Test set: accuracy after epoch {epoch}: {accuracy:.4f}")
    print(f"accuracy {accuracy:.4f}")
    return model


if __name__ == "__main__":
    model = main()
