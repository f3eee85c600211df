"""Models that run on one device and on several."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

import parwrap

TWO, THREE = ["cpu"] * 2, ["cpu"] * 3


class Net(nn.Module):
    """Convolutions, tied weights, an unused layer, and inputs and outputs of every form.

    Args:
        form: makes what the model returns of its logits.
    """

    def __init__(self, form=lambda logits: logits):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.again = nn.Conv2d(4, 4, 3, padding=1)
        self.once_more = self.again
        self.fc, self.unused = nn.Linear(64, 3), nn.Linear(2, 2)
        self.form = form

    def forward(self, images, factor=None, *, extra=None, scale=1.0):
        if isinstance(images, dict):
            images = images["images"][0]
        x = F.relu(self.once_more(F.relu(self.again(F.relu(self.conv(images))))), inplace=True)
        x = self.fc(x.flatten(1)) * scale
        x = x if factor is None else x * factor
        return self.form(x if extra is None else x + extra["row"] + extra["all"])


def after_backward(model, loss_of, x, y):
    """The loss and the gradients that one backward leaves."""
    loss = loss_of(model, x, y)
    loss.backward()
    return [loss, *(p.grad for p in model.parameters())]


def close(expected, actual, within=1e-6):
    return all(
        one is other if one is None or other is None else one.shape == other.shape and (one - other).abs().max() < within
        for one, other in zip(expected, actual, strict=True)
    )


def same(loss_of, devices=TWO, rows=7, form=lambda logits: logits, **options):
    """Whether a backward on ``devices`` leaves what it leaves on one."""
    torch.manual_seed(0)
    model, x, y = Net(form), torch.randn(rows, 1, 4, 4), torch.randint(3, (rows,))
    other = copy.deepcopy(model)
    expected = after_backward(model, loss_of, x, y)
    return close(expected, parwrap.data_parallel(devices, **options)(after_backward)(other, loss_of, x, y))


def normed():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3), nn.BatchNorm1d(3))


def trained(steps=4, model=None, rows=6):
    """The weights and buffers after a few steps."""
    torch.manual_seed(0)
    model = model or normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        x = torch.randn(rows, 1, 4, 4, dtype=next(model.parameters()).dtype)
        optimizer.zero_grad()
        F.cross_entropy(model(x).double(), (x.mean((1, 2, 3)) > 0).long()).backward()
        optimizer.step()
    return [each.detach().double() for each in model.state_dict().values()]
