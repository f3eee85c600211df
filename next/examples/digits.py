"""Handwritten digits: a small CNN on scikit-learn's bundled 8x8 images, written for one device."""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.dropout = nn.Dropout(0.25)
        self.fc1 = nn.Linear(64 * 2 * 2, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = self.dropout(torch.flatten(x, 1))
        x = self.dropout(F.relu(self.fc1(x)))
        return self.fc2(x)


def digits():
    """The images as floats in [0, 1], split into 80 % for training and 20 % for testing."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    splits = train_test_split(images, torch.tensor(labels), test_size=0.2, stratify=labels, random_state=0)
    train_images, test_images, train_labels, test_labels = splits
    return TensorDataset(train_images, train_labels), TensorDataset(test_images, test_labels)


def train(model, device, loader, optimizer):
    model.train()
    total_loss = 0.0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        total_loss += loss.item()
    return total_loss / len(loader)


@torch.no_grad()
def test(model, device, loader):
    model.eval()
    correct = 0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        correct += (model(images).argmax(dim=1) == labels).sum().item()
    return correct / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training images")
    parser.add_argument("--batch-size", type=int, default=32, help="images per step")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_set, test_set = digits()
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=256)

    model = Net().to(device)
    optimizer = optim.Adam(model.parameters(), lr=args.lr)
    for epoch in range(1, args.epochs + 1):
        loss = train(model, device, train_loader, optimizer)
        accuracy = test(model, device, test_loader)
        print(f"epoch {epoch:2d}  train loss {loss:.4f}  test accuracy {accuracy:.4f}")
    print(f"test accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
