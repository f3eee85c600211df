"""Private names of the context of a call: a trace, a transform of ``torch.func``, modes."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "PRIVATE_SAMPLERS",
    "DeviceContext",
    "TorchDispatchMode",
    "current_transform",
    "dispatch_mode_depth",
    "function_modes",
    "is_transformed",
    "operator_schema",
    "tracing_state",
]
# DeviceContext is the mode of ``torch.set_default_device``, which does not return it.
# TorchDispatchMode sees every operation below autograd. Its module is documented and has no other name.

PRIVATE_SAMPLERS = ("_standard_gamma", "_sample_dirichlet")
"""The operators that ``Gamma`` and ``Dirichlet`` of ``torch.distributions`` draw with. They have no public names."""

tracing_state: Callable[[], Any] = torch._C._get_tracing_state
"""The trace of ``torch.jit.trace`` that is being recorded, or ``None``. ``torch.jit.is_tracing`` would add a call to each forward."""

current_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
"""The innermost running transform, such as ``vmap`` or ``grad``, or ``None``. ``torch.func`` does not make it public."""

is_transformed: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether a tensor stands for others inside a transform such as ``vmap``. ``torch.func`` does not make that public."""

function_modes: Callable[[], list[Any]] = _get_current_function_mode_stack
"""The ``TorchFunctionMode`` objects that are entered, outermost first. Publicly, modes can only be entered."""

dispatch_mode_depth: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""How many ``TorchDispatchMode`` objects are entered. Publicly, modes can only be entered."""

operator_schema: Callable[[Any], Any] = attrgetter("_schema")
"""The name and the arguments of an operator that a dispatch mode sees. Only the name of its overload is public."""
