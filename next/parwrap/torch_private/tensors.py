"""Private names of tensors: their versions, the values of sparse ones, and operations without those of a subclass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from operator import attrgetter, methodcaller

import torch

__all__ = ["disable_torch_function", "sparse_values", "version_of"]

disable_torch_function: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass
"""Turns off ``__torch_function__`` of subclasses, so that a subclass can use the plain operation. It is only in ``torch._C``."""

version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
"""How often a tensor was changed in place. Publicly, only autograd compares it, in a backward, and then raises an error."""

sparse_values: Callable[[torch.Tensor], torch.Tensor] = methodcaller("_values")
"""The values of a sparse tensor as they are. The public ``values()`` takes coalesced tensors only."""
