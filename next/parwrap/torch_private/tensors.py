"""Private names of tensors: their versions."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

import torch

__all__ = ["version_of"]

version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
"""How often a tensor was changed in place. Publicly, only autograd compares it, in a backward, and then raises an error."""
