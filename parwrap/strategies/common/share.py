"""What a rank contributes to a backward that it does not run itself, while it waits for the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

__all__ = ["Share"]


class Share(NamedTuple):
    """A rank's share of a backward pass of other ranks: nothing by default.

    Attributes:
        weight: the weight of the share.
        gradients: the gradients by the id of the parameter, multiplied by ``weight``.
        averaged: a function, called when the average is in ``.grad``; returns whether this rank is still in step with the others.
    """

    weight: float = 0.0
    gradients: Mapping[int, torch.Tensor] = MappingProxyType({})
    averaged: Callable[[], bool] = lambda: False
