"""Private names of tensors: their versions, the values of sparse ones, and subclasses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter, methodcaller

import torch

from parwrap.torch_private.versions import private

__all__ = ["disable_torch_function", "make_wrapper_subclass", "sparse_values", "unsafe_view", "version_of"]

version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
"""How often a tensor was changed in place. Publicly, only autograd compares it, in a backward, and then raises an error."""

sparse_values: Callable[[torch.Tensor], torch.Tensor] = methodcaller("_values")
"""The values of a sparse tensor as they are. The public ``values()`` takes coalesced tensors only."""

unsafe_view: Callable[[torch.Tensor, Sequence[int]], torch.Tensor] = private("torch.ops.aten._unsafe_view")
"""A tensor of another shape in the same memory, which autograd does not treat as a view. ``view`` ties its result to its base."""

disable_torch_function: Callable[[], AbstractContextManager[None]] = private("torch._C.DisableTorchFunctionSubclass")
"""Turns off ``__torch_function__`` of subclasses, so that a subclass can use the plain operation. It is only in ``torch._C``."""

make_wrapper_subclass: Callable[..., torch.Tensor] = private("torch.Tensor._make_wrapper_subclass")
"""A tensor of a subclass with a shape, dtype and device and no memory. Public constructors allocate memory."""
