"""A regression with a small network, written for one device: how often must ranks talk to each other for it to be learnt?

python examples/local_sgd.py
parwrap run --nproc-per-node 2 --strategy local_sgd --every 8 examples/local_sgd.py
parwrap run --nproc-per-node 2 --strategy local_sgd --every 32 --outer nesterov examples/local_sgd.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def waves(samples):
    """Points in the plane, and the height of two crossing waves there."""
    x = torch.rand(samples, 2) * 4 - 2
    return TensorDataset(x, torch.sin(2 * x[:, :1]) + torch.cos(2 * x[:, 1:]))


def main():
    torch.manual_seed(0)
    train_set, test_set = waves(4096), waves(512)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(8):
        model.train()
        for x, y in DataLoader(train_set, batch_size=32, shuffle=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            loss = nn.functional.mse_loss(model(test_set.tensors[0]), test_set.tensors[1])
        print(f"epoch {epoch + 1}: test loss {loss:.4f}")


if __name__ == "__main__":
    main()
