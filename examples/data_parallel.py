"""Handwritten digits with batch norms, written for one device; one process may divide each batch over several.

python examples/data_parallel.py
parwrap run --data-parallel cpu,cpu --sync-bn examples/data_parallel.py
parwrap run --data-parallel all --sync-bn --no-gather examples/data_parallel.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10)
    ).to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        model.train()
        for batch in torch.randperm(1500).split(64):
            optimizer.zero_grad()
            loss = criterion(model(images[batch].to(device)), labels[batch].to(device))
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            right = model(images[1500:].to(device)).argmax(1).cpu() == labels[1500:]
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, accuracy {right.float().mean().item():.3f}")


if __name__ == "__main__":
    main()
