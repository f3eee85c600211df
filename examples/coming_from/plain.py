"""Digits on one device. parwrap runs this on many ranks as it is.

python examples/coming_from/plain.py
parwrap run --nproc-per-node 2 examples/coming_from/plain.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    train_set, test_set = torch.utils.data.Subset(dataset, range(1400)), dataset[1400:]
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(train_set, batch_size=20, shuffle=True)

    for epoch in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
        x, y = (each.to(device) for each in test_set)
        accuracy = (model(x).argmax(1) == y).float().mean().item()
        print(f"epoch {epoch + 1}: loss {loss.item():.6f}, test accuracy {accuracy:.3f}")

    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
