"""A model that workers of a parameter server train."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

X = torch.linspace(-1, 1, 32).view(16, 2)
Y = X.sum(1, keepdim=True).sin()


def train(build=lambda p: torch.optim.SGD(p, lr=0.1), samples=16, batch_size=4, epochs=2, schedule=False, clip=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = build(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if schedule else None
    loader = DataLoader(TensorDataset(X[:samples], Y[:samples]), batch_size=batch_size)
    for _ in range(epochs):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            if scheduler:
                scheduler.step()
        model.eval()
    return model


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


class Own(torch.optim.SGD):
    """An optimizer with an attribute and a step of its own."""

    def __init__(self, parameters, lr, sign):
        super().__init__(parameters, lr=lr)
        self.sign = sign

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p -= self.sign * group["lr"] * p.grad
