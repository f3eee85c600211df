"""Private names of tensors: their versions, and the values of sparse ones."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter, methodcaller

import torch

__all__ = ["sparse_values", "version_of"]

version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
"""How often a tensor was changed in place. Publicly, only autograd compares it, in a backward, and then raises an error."""

sparse_values: Callable[[torch.Tensor], torch.Tensor] = methodcaller("_values")
"""The values of a sparse tensor as they are. The public ``values()`` takes coalesced tensors only."""
