"""Models with batch norms, and the statistics that they have used."""

import torch
from torch import nn

import parwrap


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def train(net, steps, batch=8):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        x = torch.randn(batch, 2, generator=generator).chunk(parwrap.world_size())[parwrap.rank()]
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
    return net


def states(net):
    """How many different states the ranks have."""
    return len({str(each) for each in parwrap.gather(net.state_dict())})
