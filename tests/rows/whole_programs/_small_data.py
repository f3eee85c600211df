"""Small datasets for the programs."""

import torch


def blobs(n=26, d=6, classes=3):
    """n points of d numbers around one centre a class, and the classes"""
    y = torch.arange(n) % classes
    y = y[torch.randperm(n)]
    return torch.randn(n, d) * 0.7 + torch.randn(classes, d)[y], y


def line(n=26, d=5):
    """n points and a noisy linear target of shape (n, 1)"""
    x = torch.randn(n, d)
    return x, x @ torch.randn(d, 1) + 0.1 * torch.randn(n, 1)


def images(n=26, c=1, s=8, classes=3):
    """n small images with a class each"""
    y = torch.arange(n) % classes
    return torch.rand(n, c, s, s) + 0.3 * y[:, None, None, None], y


def weights(module):
    """all parameters of a module in one vector"""
    return torch.cat([p.detach().flatten() for p in module.parameters()]).clone()
