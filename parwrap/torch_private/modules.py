"""Private names of ``nn.Module``: its contents, its hooks, and the methods behind calls and moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

from torch import nn
from torch.nn.modules import batchnorm

__all__ = [
    "APPLY",
    "BUFFERS",
    "CALL",
    "FLAT_WEIGHTS",
    "LAZY_HOOKS",
    "MODULES",
    "ORIGINAL_MODULE",
    "PARAMETERS",
    "BatchNorm",
    "NormBase",
    "compiled_call",
    "is_initialized",
    "module_hooks",
    "registered_buffers",
    "registered_modules",
    "registered_parameters",
]

PARAMETERS, BUFFERS, MODULES = "_parameters", "_buffers", "_modules"
"""The attributes that hold a module's parameters, buffers and children. Public iterators skip ``None`` and duplicates."""

registered_parameters: Callable[[nn.Module], dict[str, Any]] = attrgetter(PARAMETERS)
"""A module's own parameters by name, to read and write. ``register_parameter`` refuses tensors, and iterators skip ``None``."""

registered_buffers: Callable[[nn.Module], dict[str, Any]] = attrgetter(BUFFERS)
"""A module's own buffers by name, to read and write. The public iterators skip ``None`` and duplicates."""

registered_modules: Callable[[nn.Module], dict[str, Any]] = attrgetter(MODULES)
"""A module's children by name, to read and write. ``named_children`` skips ``None`` and duplicates."""

CALL = "_call_impl"
"""The method to which ``Module.__call__`` leaves the call. torch.fx exchanges ``__call__`` itself for a while, and would lose a patch."""

APPLY = "_apply"
"""The method by which ``to``, ``cuda``, ``half`` and all others like them move a module. They share no public one."""

FLAT_WEIGHTS = "_flat_weights"
"""A recurrent layer's list of its weights, which follows from its parameters. No public attribute says that it may be dropped."""

ORIGINAL_MODULE = "_orig_mod"
"""The child of the result of ``torch.compile`` for a module. Its public type is in ``torch._dynamo``, which takes a second to import."""

LAZY_HOOKS = ("_initialize_hook", "_load_hook")
"""The attributes in which a lazy module holds its hooks until it knows its shapes. They are torch's, not the user's."""

NormBase = batchnorm._NormBase
"""The base of all layers with running statistics, batch and instance norms. They have no public one."""

BatchNorm = batchnorm._BatchNorm
"""The base of all batch norms. They have no public one."""

compiled_call: Callable[[nn.Module], Callable | None] = attrgetter("_compiled_call_impl")
"""The replacement of the call that ``module.compile()`` has installed, or ``None``. Publicly a module does not say that it is compiled."""

module_hooks: Callable[[nn.Module], tuple[Mapping[int, Callable], ...]] = attrgetter(
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
)
"""The hooks on a module's forward and backward. Publicly they can only be added and removed."""


def is_initialized(module: nn.Module) -> bool:
    """Whether ``Module.__init__`` has run, which is false while a module is being made or loaded. Public methods raise without it."""
    return MODULES in vars(module)
