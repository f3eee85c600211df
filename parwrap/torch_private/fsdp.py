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
    "clip_grads_with_norm_",
    "collect_grad_tensors",
    "forget_process_groups",
    "forget_state",
    "initialize",
    "local_tensor",
    "module_info",
    "param_groups",
    "pre_backward",
    "register_as",
    "release_groups",
    "replace_on_modules",
    "reset_iteration",
    "set_pre_backward_registration",
    "unsharded_parameter",
]

local_tensor: Callable[[DTensor], torch.Tensor] = attrgetter("_local_tensor")
"""This rank's part of a ``DTensor``. The public ``to_local()`` is an operation in the graph, which returns a view."""

param_groups: Callable[[Any], list[Any]] = attrgetter("_fsdp_param_groups")
"""The groups of parameters of a state, each gathered and reduced together. States are not public."""

pre_backward: Callable[[Any], Callable[[Any], Any]] = attrgetter("_pre_backward")
"""A state's hook that gathers its parameters when a backward reaches a gradient. It is not public."""

module_info: Callable[[Any], Any] = attrgetter("_module_info")
"""The module in which a parameter is registered, and its name there. Publicly, a parameter does not have them."""

collect_grad_tensors: Callable[[Any], tuple[torch.Tensor, ...]] = _collect_grad_tensors
"""The tensors in nested outputs that require a gradient, on which torch registers its hooks. Its module is private."""

clip_grads_with_norm_: Callable[..., None] = clip_grad._clip_grads_with_norm_
"""Scales gradients to a norm. The public ``torch.nn.utils.clip_grads_with_norm_`` is intercepted, and would lead back here."""


def unsharded_parameter(param: Any) -> nn.Parameter | None:
    """The whole parameter that autograd graphs reach, with its gradient; ``None`` before the first forward. It is not public."""
    return getattr(param, "_unsharded_param", None)


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
    """Hide a state from the states of modules above. ``fully_shard`` has no public inverse."""
    for module in state._modules:
        _module_state_mapping.pop(module, None)


def release_groups(state: Any) -> None:
    """Drop the groups of a state: graphs may hold it, and other ranks wait for a process group that something refers to. Not public."""
    state._fsdp_param_groups.clear()
    state._comm_ctx.post_forward_order.clear()


def register_as(param: Any, stand_in: nn.Parameter) -> None:
    """Register ``stand_in`` in each module while the parameter is sharded. Torch registers its own, and searches for it after a load."""
    register = param._setattr_on_modules
    param._post_load_hook_handle.remove()
    param._setattr_on_modules = lambda new: register(stand_in if new is param.sharded_param else new)
    register(stand_in)


def replace_on_modules(param: Any, new: nn.Parameter) -> None:
    """Register ``new`` in each module that holds the parameter, even if it is tied. Nothing public lists these modules."""
    param._setattr_on_modules(new)


def forget_process_groups(mesh: Any) -> None:
    """Drop the process groups that a mesh and its root hold, which torch caches forever. Publicly, a mesh cannot be closed."""
    mesh._get_root_mesh()._pg_registry.clear()
    mesh._pg_registry.clear()
