"""Weights of an nn.Module updated by hand, with no optimizer."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
bs = 25
lr = 0.5
epochs = 2


class LogisticRegression(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(n_in, n_out) / math.sqrt(n_in))
        self.bias = nn.Parameter(torch.zeros(n_out))

    def forward(self, xb):
        return xb @ self.weights + self.bias


true_weights = torch.randn(20, 4)
x = torch.randn(1050, 20)
y = (x @ true_weights).argmax(dim=1)
x_train, y_train, x_valid, y_valid = x[:750], y[:750], x[750:], y[750:]
train_dl = DataLoader(TensorDataset(x_train, y_train), batch_size=bs, shuffle=True)
valid_dl = DataLoader(TensorDataset(x_valid, y_valid), batch_size=bs * 2)

loss_func = F.cross_entropy
model = LogisticRegression(20, 4)


def fit():
    for _epoch in range(epochs):
        for xb, yb in train_dl:
            pred = model(xb)
            loss = loss_func(pred, yb)

            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= p.grad * lr
                model.zero_grad()


fit()
with torch.no_grad():
    hits = sum((model(xb).argmax(dim=1) == yb).sum() for xb, yb in valid_dl)
print(f"accuracy {hits.item() / len(x_valid):.4f}")
