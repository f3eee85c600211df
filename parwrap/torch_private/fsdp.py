"""Private names of ``fully_shard`` and ``DTensor``. Torch keeps a state for each sharded module, with groups of parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor
from torch.utils import _pytree

from parwrap.torch_private.versions import private

__all__ = [
    "DISABLED_SUBCLASSES_WORK",
    "clip_grads_with_norm_",
    "collect_grad_tensors",
    "forget_process_groups",
    "forget_state",
    "gather_in_full",
    "initialize",
    "local_tensor",
    "module_info",
    "param_groups",
    "pre_backward",
    "register_as",
    "release_groups",
    "replace_on_modules",
    "reset_iteration",
    "same_dtype",
    "set_pre_backward_registration",
    "unsharded_parameter",
]

DISABLED_SUBCLASSES_WORK = torch.__version__ >= (2, 10)  # type: ignore[operator]
"""Whether methods of tensors that are written in Python, such as ``norm``, run where ``__torch_function__`` is off, as FSDP needs it."""

local_tensor: Callable[[DTensor], torch.Tensor] = attrgetter("_local_tensor")
"""This rank's part of a ``DTensor``. The public ``to_local()`` is an operation in the graph, which returns a view."""

pre_backward: Callable[[Any], Callable[[Any], Any]] = attrgetter("_pre_backward")
"""A state's hook that gathers its parameters when a backward reaches a gradient. It is not public."""

module_info: Callable[[Any], Any] = attrgetter("_module_info")
"""The module in which a parameter is registered, and its name there. Publicly, a parameter does not have them."""

clip_grads_with_norm_: Callable[..., None] = private("torch.nn.utils.clip_grad._clip_grads_with_norm_")
"""Scales gradients to a norm. The public ``torch.nn.utils.clip_grads_with_norm_`` is intercepted, and would lead back here."""


def param_groups(state: Any) -> list[Any]:
    """The groups of parameters of a state, each gathered and reduced together. States are not public."""
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [group for group in (state._fsdp_param_group,) if group is not None]  # before torch 2.13, a state has one at most


def collect_grad_tensors(outputs: Any) -> list[torch.Tensor]:
    """The tensors in nested outputs that require a gradient, on which torch registers its hooks. Its own functions are not public."""
    found = []
    for leaf in _pytree.tree_leaves(outputs):
        if isinstance(leaf, torch.Tensor):
            found += [leaf] if leaf.requires_grad else []
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            found += collect_grad_tensors([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
    return found


def unsharded_parameter(param: Any) -> nn.Parameter | None:
    """The whole parameter that autograd graphs reach, with its gradient; ``None`` before the first forward. It is not public."""
    return getattr(param, "_unsharded_param", None)


def gather_in_full(param: Any) -> None:
    """Gather a parameter in its own dtype from now on, into a new tensor. Publicly, the dtype of a whole group is chosen once for all."""
    param.param_dtype = None
    param.all_gather_outputs = []
    param.__dict__.pop("_unsharded_param", None)


def same_dtype(params: list[Any]) -> None:
    """Cast gradients to the dtype that is reduced if they have several, as torch does where it keeps them for a later backward.

    Since torch 2.15, it reduces gradients of several dtypes together.
    """
    if torch.__version__ < (2, 15) and len({g.dtype for param in params if (g := param._unsharded_param.grad) is not None}) > 1:  # type: ignore[operator]
        for param in params:
            param.to_accumulated_grad_if_needed()


def initialize(state: Any) -> None:
    """Make a state the root of all states below its module now. Publicly, the first forward decides which state is the root."""
    state._lazy_init()


def reset_iteration(state: Any) -> None:
    """Make a root forget an interrupted forward or backward. Nothing public does that."""
    if hasattr(state, "_reset_iter_state"):
        state._reset_iter_state()
    else:
        _reset_before_torch_2_13(state)


def _reset_before_torch_2_13(state: Any) -> None:
    for each in state._state_ctx.all_states:
        each._modules_to_run_forward.clear()
        each._training_state = TrainingState.IDLE
        for group in param_groups(each):
            group.finalize_backward()  # waits for what it has sent
            group._training_state = TrainingState.IDLE
            group._to_sharded()
    state._comm_ctx.all_gather_state = state._comm_ctx.reduce_scatter_state = None
    state._comm_ctx.post_forward_order.clear()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False


def set_pre_backward_registration(state: Any, register: Callable[[Any], Any]) -> None:
    """Make ``register`` receive and return a state's outputs after each forward, where torch registers its own hooks. Not public."""
    state._register_pre_backward_hook = register


def forget_state(state: Any) -> None:
    """Hide a state from the states of modules above. ``fully_shard`` has no public inverse."""
    for module in state._modules:
        _module_state_mapping.pop(module, None)


def release_groups(state: Any) -> None:
    """Drop the groups of a state: graphs may hold it, and other ranks wait for a process group that something refers to. Not public."""
    if hasattr(state, "_fsdp_param_groups"):
        state._fsdp_param_groups.clear()
    else:
        state._fsdp_param_group = None
    state._comm_ctx.post_forward_order.clear()


def register_as(param: Any, stand_in: nn.Parameter) -> None:
    """Register ``stand_in`` in each module while the parameter is sharded, in place of torch's own sharded parameter. It is not public."""
    register = param._setattr_on_modules
    param._post_load_hook_handle.remove()
    param._setattr_on_modules = lambda new: register(stand_in if new is param.sharded_param else new)
    register(stand_in)


def replace_on_modules(param: Any, new: nn.Parameter) -> None:
    """Register ``new`` in each module that holds the parameter, even if it is tied. Nothing public lists these modules."""
    param._setattr_on_modules(new)


def forget_process_groups(mesh: Any) -> None:
    """Drop the process groups of a mesh and its root: since torch 2.13 they hold them, and torch caches meshes forever.

    Nothing public closes a mesh.
    """
    if hasattr(mesh, "_pg_registry"):  # before torch 2.13, a mesh holds their names
        mesh._get_root_mesh()._pg_registry.clear()
        mesh._pg_registry.clear()
