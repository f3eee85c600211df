"""A training function with one line added, and what a script may ask parwrap for besides.

python examples/decorated.py
parwrap run --nproc-per-node 2 examples/decorated.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import parwrap


@parwrap.rank_zero_only
def report(epoch, loss, accuracy):
    print(f"epoch {epoch + 1}: training loss {loss:.3f}, held-out accuracy {accuracy:.3f}")


@torch.no_grad()
def accuracy_of(model, loader):
    """Every rank sees all of the loader here, so this is the accuracy of a single process."""
    model.eval()
    correct = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    return correct / len(loader.dataset)


@parwrap.distributed(seed=0)
def train(epochs=5):
    digits = load_digits()
    dataset = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    train_set, held_out = random_split(dataset, [0.8, 0.2])
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DataLoader(train_set, batch_size=32, shuffle=True)
    for epoch in range(epochs):
        model.train()
        summed, seen = 0.0, 0
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            summed, seen = summed + loss.item() * len(y), seen + len(y)
        # this rank has seen its share only; for the loss over all data, ask the others
        summed, seen = parwrap.total((summed, seen), of=loader)
        accuracy = accuracy_of(model, DataLoader(held_out, batch_size=256))
        report(epoch, summed / seen, accuracy)
    return accuracy


if __name__ == "__main__":
    print(f"held-out accuracy {train():.3f} on {parwrap.world_size()} rank(s)")
