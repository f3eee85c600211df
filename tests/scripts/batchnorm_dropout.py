"""A small CNN with BatchNorm and Dropout, which train() and eval() switch."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(8)
        self.dropout = nn.Dropout(0.25)
        self.fc1 = nn.Linear(8 * 4 * 4, 32)
        self.bn2 = nn.BatchNorm1d(32)
        self.fc2 = nn.Linear(32, 4)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = torch.flatten(self.dropout(x), 1)
        x = self.dropout(F.relu(self.bn2(self.fc1(x))))
        return F.log_softmax(self.fc2(x), dim=1)


def bright_quadrants(count):
    """8x8 noise, brighter in one quadrant, which is the label."""
    target = torch.randint(4, (count,))
    quadrant = F.one_hot(target, 4).float().view(count, 1, 2, 2)
    return TensorDataset(F.interpolate(quadrant, scale_factor=4) + 5 + torch.randn(count, 1, 8, 8), target)


def main():
    parser = argparse.ArgumentParser(description="BatchNorm and Dropout example")
    parser.add_argument("--batch-size", type=int, default=20, metavar="N")
    parser.add_argument("--epochs", type=int, default=3, metavar="N")
    parser.add_argument("--lr", type=float, default=0.05, metavar="LR")
    args = parser.parse_args()

    torch.manual_seed(1)
    train_loader = DataLoader(bright_quadrants(800), batch_size=args.batch_size, shuffle=True, drop_last=True)
    test_loader = DataLoader(bright_quadrants(400), batch_size=200)
    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    for _epoch in range(args.epochs):
        model.train()
        for data, target in train_loader:
            optimizer.zero_grad()
            F.nll_loss(model(data), target).backward()
            optimizer.step()

        model.eval()
        test_loss = correct = 0
        with torch.no_grad():
            for data, target in test_loader:
                output = model(data)
                test_loss += F.nll_loss(output, target, reduction="sum").item()
                correct += output.argmax(dim=1).eq(target).sum().item()
        print(f"Test set: Average loss: {test_loss / len(test_loader.dataset):.4f}, Accuracy: {correct}/{len(test_loader.dataset)}")

    print(f"accuracy {correct / len(test_loader.dataset):.4f}")
    return model


if __name__ == "__main__":
    model = main()
