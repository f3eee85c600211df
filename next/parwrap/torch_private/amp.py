"""Private names of mixed precision: the scale of a ``GradScaler``."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

import torch

__all__ = ["scale_of"]

scale_of: Callable[[torch.amp.GradScaler], torch.Tensor] = attrgetter("_scale")
"""The scale as a tensor on the device. The public ``get_scale`` waits for the device."""
