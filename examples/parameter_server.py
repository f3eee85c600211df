"""A linear model that classifies digits, written for one device.

python examples/parameter_server.py
parwrap run --nproc-per-node 3 --strategy parameter_server examples/parameter_server.py
parwrap run --nproc-per-node 3 --strategy parameter_server --staleness 0 --batch global examples/parameter_server.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


def main():
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    train_set, test_set = random_split(dataset, [0.8, 0.2])
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(6):
        model.train()
        for x, y in DataLoader(train_set, batch_size=16, shuffle=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            correct = sum((model(x).argmax(1) == y).sum().item() for x, y in DataLoader(test_set, batch_size=256))
        print(f"epoch {epoch + 1}: test accuracy {correct / len(test_set):.4f}")


if __name__ == "__main__":
    main()
