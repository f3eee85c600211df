"""A wide network that learns a function by Adam, written for one device; in the end it says how much the optimizer keeps.

python examples/zero1.py
parwrap run --nproc-per-node 2 --strategy zero1 examples/zero1.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    torch.manual_seed(0)
    x = torch.rand(2048, 8)
    dataset = TensorDataset(x, (x.prod(1, keepdim=True) * 100).tanh())
    model = nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(4):
        for inputs, targets in DataLoader(dataset, batch_size=32, shuffle=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        with torch.no_grad():
            print(f"epoch {epoch + 1}: loss {nn.functional.mse_loss(model(x), dataset.tensors[1]):.5f}")
    kept = sum(value.numel() for state in optimizer.state.values() for value in state.values())
    print(f"{kept} numbers of state here for {sum(p.numel() for p in model.parameters())} parameters")


if __name__ == "__main__":
    main()
