"""Private names around torch's functions: where they are, how subclasses meet them, trees of arguments, and transforms."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch._functorch import apis, eager_transforms
from torch.utils import _pytree

from parwrap.torch_private.versions import private

__all__ = [
    "FOREACH",
    "NATIVE",
    "TRANSFORMS",
    "Criterion",
    "all_hooks",
    "enable_torch_function",
    "forward_hooks",
    "has_backward_hooks",
    "is_view",
    "pytree",
]

enable_torch_function: Callable[[], AbstractContextManager[None]] = private("torch._C._EnableTorchFunction")
"""Turns ``__torch_function__`` of subclasses on again, where a call of one has turned it off. It is only in ``torch._C``."""

NATIVE: Any = private("torch._C._nn")
"""The module with the functions behind ``torch.nn.functional``, which some modules call under these names."""

FOREACH = tuple(getattr(torch, name) for name in dir(torch) if name.startswith("_foreach_"))
"""The functions with which optimizers step lists of tensors. None of them is public."""

TRANSFORMS = (
    (apis, "vmap_impl"),
    *((eager_transforms, name) for name in ("grad_impl", "grad_and_value_impl", "_vjp_with_argnums", "_jvp_with_argnums")),
)
"""Where the transforms of ``torch.func`` get their arguments: a module and a name each. The public names only make functions."""

Criterion = nn.modules.loss._Loss
"""The base class of torch's loss modules. It has no public name."""

pytree = _pytree
"""torch's trees of lists, tuples and dicts, to which libraries add their own classes. The module is not public yet."""

is_view: Callable[[torch.Tensor], bool] = torch.Tensor._is_view
"""Whether autograd knows a tensor as a view of another. Publicly, nothing tells."""


def forward_hooks(module: nn.Module) -> tuple[dict[int, Callable], dict[int, Callable]]:
    """The hooks of ``register_forward_hook`` and ``register_forward_pre_hook``, by their numbers. Publicly, none can be listed."""
    return module._forward_hooks, module._forward_pre_hooks


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether ``module`` has hooks of ``register_full_backward_hook`` or ``register_full_backward_pre_hook``. No public name tells."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def all_hooks(module: nn.Module) -> list[int]:
    """The numbers of all hooks on ``module`` and those inside. Publicly, hooks are only added and removed."""
    return [
        key
        for each in module.modules()
        for hooks in (*forward_hooks(each), each._backward_hooks, each._backward_pre_hooks)
        for key in hooks
    ]
