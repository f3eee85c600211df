"""Private names of ``nn.Module``: its contents, the methods behind calls, moves and copies, and the bases of norms."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter, methodcaller
from typing import Any

from torch import nn
from torch.nn.modules import batchnorm

__all__ = [
    "APPLY",
    "CALL",
    "CONTENTS",
    "FLAT_WEIGHTS",
    "INFER",
    "IS_REPLICA",
    "ORIGINAL_MODULE",
    "BatchNorm",
    "NormBase",
    "compiled_call",
    "registered_buffers",
    "registered_modules",
    "registered_parameters",
    "shallow_replica",
]

registered_parameters: Callable[[nn.Module], dict[str, Any]] = attrgetter("_parameters")
"""A module's own parameters by name, to read and write. ``register_parameter`` refuses tensors, and iterators skip ``None``."""

registered_buffers: Callable[[nn.Module], dict[str, Any]] = attrgetter("_buffers")
"""A module's own buffers by name, to read and write. The public iterators skip ``None`` and duplicates."""

registered_modules: Callable[[nn.Module], dict[str, Any]] = attrgetter("_modules")
"""A module's children by name, to read and write. ``named_children`` skips ``None`` and duplicates."""

APPLY = "_apply"
"""The method with which ``to``, ``cuda``, ``half`` and similar methods move a module. They share no public method."""

CALL = "_call_impl"
"""The method that ``Module.__call__`` calls. A patch of ``__call__`` itself would be lost when torch.fx replaces it temporarily."""

INFER = "_infer_parameters"
"""The method of lazy modules that makes their parameters, in the first forward. Each class has a public one, which this one calls."""

CONTENTS = ("_parameters", "_buffers", "_modules")
"""The attributes in which a module keeps what it consists of. No public method replaces them all, in place."""

BatchNorm = batchnorm._BatchNorm
"""The base class of all batch norms. It has no public name."""

NormBase = batchnorm._NormBase
"""The base class of all layers with running statistics, which are batch and instance norms. It has no public name."""

FLAT_WEIGHTS = "_flat_weights"
"""The attribute with a recurrent layer's list of its weights, which can be rebuilt from its parameters. It is not public."""

ORIGINAL_MODULE = "_orig_mod"
"""The attribute with the original module in a result of ``torch.compile``, whose type is in ``torch._dynamo``, which is slow to import."""

compiled_call: Callable[[nn.Module], Callable | None] = attrgetter("_compiled_call_impl")
"""The replacement of the call that ``module.compile()`` has installed, or ``None``. A module does not make this public."""

shallow_replica: Callable[[nn.Module], Any] = methodcaller("_replicate_for_data_parallel")
"""A copy of a module with separate dicts, without parameters yet. ``copy.copy`` would share the dicts."""

IS_REPLICA = "_is_replica"
"""The attribute that marks a copy by :data:`shallow_replica`, as ``nn.DataParallel`` makes too. Publicly, copies cannot be recognized."""
