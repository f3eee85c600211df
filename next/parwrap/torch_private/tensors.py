"""Private names of tensors: versions, subclasses and operations on lists of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter, methodcaller

import torch

__all__ = [
    "disable_torch_function",
    "foreach_add",
    "foreach_add_",
    "foreach_mul_",
    "make_wrapper_subclass",
    "sparse_values",
    "version_of",
]

version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
"""How often a tensor was changed in place. Publicly, only autograd compares it, in a backward, and then raises an error."""

sparse_values: Callable[[torch.Tensor], torch.Tensor] = methodcaller("_values")
"""The values of a sparse tensor as they are. The public ``values()`` takes coalesced tensors only."""

disable_torch_function: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass
"""Turns off ``__torch_function__`` of subclasses, so that a subclass can use the plain operation. It is only in ``torch._C``."""

make_wrapper_subclass: Callable[..., torch.Tensor] = torch.Tensor._make_wrapper_subclass
"""A tensor of a subclass with a shape, dtype and device and no memory. Public constructors allocate memory."""

foreach_add: Callable[..., Sequence[torch.Tensor]] = torch._foreach_add
"""The sums of two lists of tensors, in few kernels. No operation on lists is public."""

foreach_add_: Callable[..., object] = torch._foreach_add_
"""Adds a list of tensors to another in place, in few kernels. No operation on lists is public."""

foreach_mul_: Callable[..., object] = torch._foreach_mul_
"""Multiplies a list of tensors in place by a factor, in few kernels. No operation on lists is public."""
