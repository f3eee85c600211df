"""An exponential moving average of the weights, kept in a copy.deepcopy of the model."""

import copy

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class ModelEMA:
    def __init__(self, model, decay):
        self.module = copy.deepcopy(model).eval()
        self.decay = decay
        for p in self.module.parameters():
            p.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for ema_v, model_v in zip(self.module.state_dict().values(), model.state_dict().values()):
            ema_v.copy_(self.decay * ema_v + (1.0 - self.decay) * model_v)


def main():
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(900, 10, generator=gen)
    y = (x[:, 0] * x[:, 1] + x[:, 2]).unsqueeze(1) + 0.2 * torch.randn(900, 1, generator=gen)
    train_loader = DataLoader(TensorDataset(x[:600], y[:600]), batch_size=20, shuffle=True)
    test_x, test_y = x[600:], y[600:]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))
    ema = ModelEMA(model, decay=0.9)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    loss_fn = nn.MSELoss()

    for epoch in range(2):
        model.train()
        for inputs, targets in train_loader:
            loss = loss_fn(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update(model)
        with torch.no_grad():
            print(f"epoch {epoch}: EMA loss {loss_fn(ema.module(test_x), test_y).item():.4f}")

    with torch.no_grad():
        print(f"loss {loss_fn(ema.module(test_x), test_y).item():.4f}")
    return model


if __name__ == "__main__":
    model = main()
