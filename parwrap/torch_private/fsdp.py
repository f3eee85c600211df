"""Private names of ``fully_shard`` and ``DTensor``. Torch keeps a state for each sharded module, with groups of parameters."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp._common_utils import collect_grad_tensors as _collect_grad_tensors
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad

__all__ = [
    "UNSHARDED_PARAM",
    "clip_grads_with_norm_",
    "collect_grad_tensors",
    "communication_context",
    "forget_state",
    "forward_root",
    "initialize",
    "local_tensor",
    "module_info",
    "param_groups",
    "parameter_name",
    "pre_backward",
    "replace_on_modules",
    "reset_iteration",
    "set_pre_backward_registration",
    "to_sharded",
]

UNSHARDED_PARAM = "_unsharded_param"
"""The attribute in which torch keeps a whole parameter, with its gradient; absent before the first forward. It is not public."""

local_tensor: Callable[[DTensor], torch.Tensor] = attrgetter("_local_tensor")
"""This rank's part of a ``DTensor``. The public ``to_local()`` is an operation in the graph, which returns a view."""

param_groups: Callable[[Any], list[Any]] = attrgetter("_fsdp_param_groups")
"""The groups of parameters of a state, each gathered and reduced together. States are not public."""

forward_root: Callable[[Any], Any] = attrgetter("_state_ctx.iter_forward_root")
"""The outermost state whose forward runs or was interrupted, or ``None``. It is not public."""

pre_backward: Callable[[Any], Callable[[Any], Any]] = attrgetter("_pre_backward")
"""A state's hook that gathers its parameters when a backward reaches a gradient. It is not public."""

module_info: Callable[[Any], Any] = attrgetter("_module_info")
"""The module in which a parameter is registered, and its name there. Publicly, a parameter does not have them."""

parameter_name: Callable[[Any], str] = attrgetter("_param_fqn")
"""The name of a parameter, as in its root's ``named_parameters``. It is not public."""

collect_grad_tensors: Callable[[Any], tuple[torch.Tensor, ...]] = _collect_grad_tensors
"""The tensors in nested outputs that require a gradient, on which torch registers its hooks. Its module is private."""

clip_grads_with_norm_: Callable[..., None] = clip_grad._clip_grads_with_norm_
"""Scales gradients to a norm. The public ``torch.nn.utils.clip_grads_with_norm_`` is intercepted, and would lead back here."""


def initialize(state: Any) -> None:
    """Make a state the root of all states below its module now. Publicly, the first forward decides which state is the root."""
    state._lazy_init()


def reset_iteration(state: Any) -> None:
    """Make a root forget an interrupted forward or backward. Nothing public does that."""
    state._reset_iter_state()


def set_pre_backward_registration(state: Any, register: Callable[[Any], Any]) -> None:
    """Make ``register`` receive and return a state's outputs after each forward, where torch registers its own hooks. Not public."""
    state._register_pre_backward_hook = register


def forget_state(state: Any) -> None:
    """Hide this state from the states of modules above. ``fully_shard`` has no public inverse."""
    for module in state._modules:
        _module_state_mapping.pop(module, None)


def communication_context(state: Any) -> Any:
    """The object that a root's states share, with the groups in the order of the last forward. It is not public."""
    return state._comm_ctx


def to_sharded(group: Any) -> None:
    """Put the sharded parameters of a group back on its modules. ``reshard`` does that only in some training states."""
    group._to_sharded()


def replace_on_modules(param: Any, new: nn.Parameter) -> None:
    """Register ``new`` in each module that holds the parameter, even if it is tied. Nothing public lists these modules."""
    param._setattr_on_modules(new)
