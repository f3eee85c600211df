"""Logistic regression on sparse features: processes train one model in shared memory, without waiting for each other.

A sample has 76 of 47,236 features, as in the Reuters corpus RCV1. Two samples rarely share a weight, so workers that write to the same
memory without a lock rarely disturb each other (Recht et al., 2011). The samples are synthetic.

python examples/hogwild.py
python examples/hogwild.py --workers 1
"""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parwrap

FEATURES, PRESENT = 47_236, 76


def samples(number):
    """Features, their values and the labels of a linear model."""
    features = (torch.rand(number, PRESENT) ** 4 * FEATURES).long()  # the first are the most frequent, like sorted words
    values = torch.rand(number, PRESENT)
    weights = torch.randn(FEATURES) / torch.arange(1.0, FEATURES + 1) ** 0.25
    scores = (weights[features] * values).sum(1)
    return TensorDataset(features, values, (scores > scores.median()).float())


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.EmbeddingBag(FEATURES, 1, mode="sum", sparse=True)
        nn.init.zeros_(self.weights.weight)

    def forward(self, features, values):
        return self.weights(features, per_sample_weights=values).squeeze(1)


def train(model, dataset, epochs, batch_size, lr):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=True)
    for epoch in range(1, epochs + 1):
        for features, values, labels in loader:
            optimizer.zero_grad()
            loss = F.binary_cross_entropy_with_logits(model(features, values), labels)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}  last loss {loss.item():.4f}")


@torch.no_grad()
def accuracy_of(model, dataset):
    features, values, labels = dataset.tensors
    return ((model(features, values) > 0) == labels.bool()).float().mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2, help="number of processes")
    parser.add_argument("--samples", type=int, default=40_000, help="number of samples; a tenth is for testing")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the samples")
    parser.add_argument("--batch-size", type=int, default=8, help="samples per step")
    parser.add_argument("--lr", type=float, default=0.3, help="learning rate")
    args = parser.parse_args()

    torch.manual_seed(0)
    every = samples(args.samples)
    held_out = args.samples // 10
    train_set, test_set = (TensorDataset(*(each[part] for each in every.tensors)) for part in (slice(held_out, None), slice(held_out)))

    model = Linear()
    begin = time.perf_counter()
    parwrap.hogwild(workers=args.workers)(train)(model, train_set, args.epochs, args.batch_size, args.lr)
    seconds = time.perf_counter() - begin
    print(f"{args.epochs * len(train_set) / seconds:.0f} samples/s on {args.workers} worker(s)")
    print(f"test accuracy {accuracy_of(model, test_set):.4f}")


if __name__ == "__main__":
    main()
