"""A recurrent network whose gradients are clipped with clip_grad_norm_ before each step."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SEQUENCE_LENGTH = 12


class RNNModel(nn.Module):
    def __init__(self, nhid):
        super().__init__()
        self.rnn = nn.GRU(1, nhid, batch_first=True)
        self.decoder = nn.Linear(nhid, 1)

    def forward(self, sequences):
        output, _ = self.rnn(sequences)
        return self.decoder(output[:, -1])


def waves(count):
    """A noisy sine from a random phase on, and the value that follows it."""
    start = 6.28 * torch.rand(count, 1)
    wave = torch.sin(start + 0.4 * torch.arange(SEQUENCE_LENGTH + 1)) + 0.1 * torch.randn(count, SEQUENCE_LENGTH + 1)
    return TensorDataset(wave[:, :-1, None], wave[:, -1:])


def evaluate(model, loader, criterion):
    model.eval()
    total_loss = 0.0
    with torch.no_grad():
        for sequences, targets in loader:
            total_loss += len(sequences) * criterion(model(sequences), targets).item()
    return total_loss / len(loader.dataset)


def train(model, loader, criterion, optimizer, clip):
    model.train()
    for sequences, targets in loader:
        optimizer.zero_grad()
        loss = criterion(model(sequences), targets)
        loss.backward()
        # `clip_grad_norm` helps prevent the exploding gradient problem in RNNs / LSTMs.
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def main():
    parser = argparse.ArgumentParser(description="Sine wave RNN model")
    parser.add_argument("--nhid", type=int, default=16, help="number of hidden units")
    parser.add_argument("--lr", type=float, default=0.02, help="initial learning rate")
    parser.add_argument("--clip", type=float, default=0.25, help="gradient clipping")
    parser.add_argument("--epochs", type=int, default=3, help="upper epoch limit")
    parser.add_argument("--batch_size", type=int, default=25, metavar="N", help="batch size")
    parser.add_argument("--seed", type=int, default=1111, help="random seed")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    train_loader = DataLoader(waves(500), batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(waves(300), batch_size=100)

    model = RNNModel(args.nhid)
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    for epoch in range(1, args.epochs + 1):
        train(model, train_loader, criterion, optimizer, args.clip)
        print(f"| end of epoch {epoch:3d} | test loss {evaluate(model, test_loader, criterion):5.4f}")
    print(f"loss {evaluate(model, test_loader, criterion):.4f}")
    return model


if __name__ == "__main__":
    model = main()
