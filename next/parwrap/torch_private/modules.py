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
"""The method that ``Module.__call__`` calls. torch.fx replaces ``__call__`` itself temporarily, and would lose a patch of it."""

APPLY = "_apply"
"""The method with which ``to``, ``cuda``, ``half`` and similar methods move a module. They share no public method."""

FLAT_WEIGHTS = "_flat_weights"
"""The attribute with a recurrent layer's list of its weights, which can be rebuilt from its parameters. It is not public."""

ORIGINAL_MODULE = "_orig_mod"
"""The original module's name in the result of ``torch.compile``. The result's type is in ``torch._dynamo``, which is slow to import."""

LAZY_HOOKS = ("_initialize_hook", "_load_hook")
"""The attributes in which a lazy module holds its hooks until it knows its shapes. They are torch's, not the user's."""

NormBase = batchnorm._NormBase
"""The base class of all layers with running statistics, which are batch and instance norms. It has no public name."""

BatchNorm = batchnorm._BatchNorm
"""The base class of all batch norms. It has no public name."""

compiled_call: Callable[[nn.Module], Callable | None] = attrgetter("_compiled_call_impl")
"""The replacement of the call that ``module.compile()`` has installed, or ``None``. A module does not make this public."""

module_hooks: Callable[[nn.Module], tuple[Mapping[int, Callable], ...]] = attrgetter(
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
)
"""The hooks on a module's forward and backward. Publicly, they can only be added and removed."""


def is_initialized(module: nn.Module) -> bool:
    """Whether ``Module.__init__`` has run, which is false while a module is being made or loaded. Until then, public methods raise."""
    return MODULES in vars(module)
