"""A call that starts its own ranks: run this with plain python, or paste it into a notebook.

python examples/self_launch.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import parwrap

digits = load_digits()
dataset = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
train_set, held_out = random_split(dataset, [0.8, 0.2])
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def train(epochs):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(epochs):
        for x, y in DataLoader(train_set, batch_size=32, shuffle=True):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}: training loss {loss.item():.3f} on rank 0 of {parwrap.world_size()}")


parwrap.launch(train, epochs=5, nprocs=2)

# the ranks have ended, and the model of this process is trained
with torch.no_grad():
    x, y = held_out[:]
    print(f"held-out accuracy {(model(x).argmax(1) == y).float().mean():.3f} on {parwrap.world_size()} rank")
