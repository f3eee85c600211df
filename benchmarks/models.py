"""What is trained to time a step: small classifiers of different shapes, each with batches of random data to learn by heart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["CASES", "Case"]

CLASSES = 10


@dataclass(frozen=True)
class Case:
    """A model and the shape of its inputs, the batch first."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]

    def batch(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Random inputs and their classes."""
        return torch.randn(self.shape, generator=generator), torch.randint(CLASSES, self.shape[:1], generator=generator)


def _mlp(*widths: int) -> nn.Sequential:
    layers = [layer for width, after in pairwise(widths) for layer in (nn.Linear(width, after), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def _deep(layers: int, width: int) -> nn.Sequential:
    blocks = [nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()) for _ in range(layers)]
    return nn.Sequential(*blocks, nn.Linear(width, CLASSES))


class _Residual(nn.Module):
    def __init__(self, channels: int, after: int, stride: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(channels, after, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(channels, after, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.inner(x) + self.shortcut(x))


def _resnet(*channels: int) -> nn.Sequential:
    stages = [
        block for before, after in pairwise(channels) for block in (_Residual(before, after, stride=2), _Residual(after, after, stride=1))
    ]
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], CLASSES)
    return nn.Sequential(nn.Conv2d(3, channels[0], 3, padding=1), *stages, *head)


class _Transformer(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x).mean(dim=1))


CASES = {
    "tiny": Case(lambda: _mlp(32, 64, 64, CLASSES), (32, 32)),
    "deep": Case(lambda: _deep(layers=60, width=64), (64, 64)),
    "wide": Case(lambda: _mlp(512, 1024, 1024, CLASSES), (64, 512)),
    "resnet": Case(lambda: _resnet(16, 32, 64), (8, 3, 32, 32)),
    "transformer": Case(lambda: _Transformer(width=128, layers=2), (8, 32, 128)),
}
