"""One process on several devices: the same training plainly, divided, and with outputs left where they are.

python examples/data_parallel.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import parwrap

DEVICES = list(range(torch.cuda.device_count())) if torch.cuda.device_count() > 1 else ["cpu", "cpu"]


def train(epochs=8):
    torch.manual_seed(0)
    digits = load_digits()
    device = torch.device("cuda" if torch.cuda.device_count() > 1 else "cpu")
    images = torch.tensor(digits.data, dtype=torch.float32, device=device) / 16
    labels = torch.tensor(digits.target, device=device)
    model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10)).to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(epochs):
        for batch in torch.randperm(1500, device=device).split(100):
            optimizer.zero_grad()
            loss = criterion(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        return (model(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()


if __name__ == "__main__":
    print(f"on one device: accuracy {train():.3f}")
    divided = parwrap.data_parallel(DEVICES)(parwrap.sync_bn(train))
    print(f"on {', '.join(map(str, DEVICES))}: accuracy {divided():.3f}")
    in_pieces = parwrap.data_parallel(DEVICES, gather=False)(parwrap.sync_bn(train))
    print(f"with outputs left there: accuracy {in_pieces():.3f}")
