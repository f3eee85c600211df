"""LBFGS, whose step() calls a closure several times on the full batch."""

import argparse

import torch
import torch.nn as nn
import torch.optim as optim


class Sequence(nn.Module):
    """Predicts the next value of a wave from its last eight."""

    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(8, 20)
        self.out = nn.Linear(20, 1)

    def forward(self, window):
        return self.out(torch.tanh(self.hidden(window)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5, help="steps to run")
    opt = parser.parse_args()
    torch.manual_seed(0)

    shift = torch.randint(-80, 80, (40, 1))
    waves = torch.sin((torch.arange(60) + shift) / 5.0) + 0.05 * torch.randn(40, 60)
    windows = waves.unfold(1, 9, 1)
    train_windows, test_windows = windows[:30].reshape(-1, 9), windows[30:].reshape(-1, 9)

    model = Sequence()
    criterion = nn.MSELoss()
    optimizer = optim.LBFGS(model.parameters(), lr=0.8)
    for i in range(opt.steps):

        def closure():
            optimizer.zero_grad()
            loss = criterion(model(train_windows[:, :8]), train_windows[:, 8:])
            loss.backward()
            return loss

        print("STEP", i, "loss:", optimizer.step(closure).item())

    with torch.no_grad():
        test_loss = criterion(model(test_windows[:, :8]), test_windows[:, 8:])
    print("loss", test_loss.item())
