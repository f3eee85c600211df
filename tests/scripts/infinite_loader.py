"""An endless loader, RandomSampler(replacement=True, num_samples=10**10), left after a number of steps."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

NUM_STEPS = 70
EVAL_EVERY = 50


def get_datasets():
    centers = torch.tensor([[1.0, 1.0], [-1.0, 1.0], [-1.0, -1.0], [1.0, -1.0]])
    cluster = torch.randint(4, (1200,))
    x = centers[cluster] + 0.3 * torch.randn(1200, 2)
    y = cluster % 2
    return TensorDataset(x[:800], y[:800]), TensorDataset(x[800:], y[800:])


def main():
    torch.manual_seed(0)
    train_set, test_set = get_datasets()
    sampler = RandomSampler(train_set, replacement=True, num_samples=10**10)
    train_loader = DataLoader(train_set, batch_size=16, sampler=sampler)
    test_loader = DataLoader(test_set, batch_size=200)

    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step, (x, y) in zip(range(1, NUM_STEPS + 1), train_loader):
        model.train()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

        if step % EVAL_EVERY == 0:
            model.eval()
            with torch.no_grad():
                correct = sum((model(x).argmax(1) == y).sum().item() for x, y in test_loader)
            accuracy = correct / len(test_set)
            print(f"step {step}: test accuracy {accuracy:.4f}")
    print(f"accuracy {accuracy:.4f}")
    return model


if __name__ == "__main__":
    model = main()
