"""Copies another rank's training state, for a rank that has missed steps and continues with the others.

It copies parameters with their gradients, buffers of the models around them, optimizers and schedulers. Variables of the script itself (a
step counter, a copy of the weights for averaging) are unknown here. This happens rarely, so the code is simple rather than fast.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from parwrap.group.collectives import home
from parwrap.group.group import Group
from parwrap.loop.loop_state import Loop
from parwrap.strategies.common.reducer import Reducer
from parwrap.torch_private.modules import is_initialized

__all__ = ["optimizers_and_schedulers", "outermost_modules", "take_state", "tensors_by_name"]


@torch.inference_mode(False)
@torch.no_grad()
def take_state(group: Group, loop: Loop, averaged: Mapping[tuple[int, int], torch.Tensor], source: int, takes: bool = True) -> None:
    """Set this rank's state to that of rank ``source``; called on all ranks, and changes nothing on ``source``.

    Args:
        group: the process group.
        loop: the loop state, which knows the optimizers.
        averaged: the parameters whose gradients are averaged, numbered alike on all ranks.
        source: a rank that has missed nothing.
        takes: whether this rank copies the state, or only takes part.
    """
    sends = group.world.rank == source
    tensors = tensors_by_name(loop, averaged)
    objects = optimizers_and_schedulers(loop)
    names: dict[int, list[Any]] = {}
    for name, named in tensors.items():
        names.setdefault(id(named), []).append(name)
    mine = [(tensors[known[0]], known) for known in names.values()]

    received: list[Any] = [None, None]
    if sends:
        received = [[_TensorDescription(known, t.shape, t.dtype, t.grad is not None if t.is_leaf else False) for t, known in mine]]
        received += [{name: each.state_dict() for name, each in objects.items()}]
    dist.broadcast_object_list(received, source)
    layout, states = received
    for index, each in enumerate(layout):
        tensor: torch.Tensor | None = mine[index][0] if sends else next((tensors[name] for name in each.names if name in tensors), None)
        values = _broadcast(group, tensor if sends else None, each, source)
        grad = _broadcast(group, tensor.grad if sends and tensor is not None else None, each, source) if each.has_grad else None
        if takes and not sends and tensor is not None and tensor.shape == values.shape:
            tensor.data.copy_(values)
            if tensor.requires_grad or tensor.grad is not None:
                tensor.grad = None if grad is None else grad.to(tensor)
    if takes and not sends:
        for name, state in states.items():
            if name in objects and _sizes(objects[name].state_dict()) == _sizes(state):
                objects[name].load_state_dict(state)


def _sizes(state: Mapping[str, Any]) -> list[int]:
    """The number of parameters in each group of an optimizer; on another rank, it may have received more."""
    return [len(group["params"]) for group in state.get("param_groups", ())]


class _TensorDescription(NamedTuple):
    """The description of a tensor that is sent first; a rank knows the tensor by one of its names, or not at all."""

    names: list[Any]
    shape: torch.Size
    dtype: torch.dtype
    has_grad: bool


def _broadcast(group: Group, tensor: torch.Tensor | None, received: _TensorDescription, source: int) -> torch.Tensor:
    """The values of ``tensor``, which is given on rank ``source``."""
    where = home(group)
    values = (
        torch.empty(received.shape, dtype=received.dtype, device=where)
        if tensor is None
        else tensor.detach().to_dense().to(where, copy=True)
    )
    dist.broadcast(values, source)
    return values


def tensors_by_name(loop: Loop, averaged: Mapping[tuple[int, int], torch.Tensor]) -> dict[Any, torch.Tensor]:
    """Parameters and buffers by names that are the same on all ranks: by their position in a model, in an optimizer or in an average.

    A model is identified by the first of its parameters that an optimizer has had, because one rank may own more of it than another.
    """
    owned = loop.once_owned()
    number_of = {id(p): number for number, p in owned.items()}
    tensors: dict[Any, torch.Tensor] = {}
    for module in outermost_modules():
        known = [(number_of[id(p)], path) for path, p in module.named_parameters() if id(p) in number_of]
        if known and not isinstance(module, Reducer):
            for path, tensor in (*module.named_parameters(), *module.named_buffers()):
                tensors["model", min(known), path] = tensor
    tensors |= {("owned", number): p for number, p in owned.items()}
    return tensors | {("averaged", number): p for number, p in averaged.items()}


def optimizers_and_schedulers(loop: Loop) -> dict[Any, Any]:
    """The live optimizers and schedulers by the optimizer's number; schedulers also by their age among those of their optimizer."""
    found: dict[Any, Any] = {}
    schedulers = _alive(LRScheduler)
    for number, optimizer in loop.numbered_optimizers():
        found[number] = optimizer
        own = [scheduler for scheduler in schedulers if getattr(scheduler, "optimizer", None) is optimizer]
        found |= {(number, place): scheduler for place, scheduler in enumerate(own)}
    return found


def outermost_modules() -> list[nn.Module]:
    """Every live module that is not inside another one, the oldest first, except those still being built."""
    modules = [module for module in _alive(nn.Module) if is_initialized(module)]
    inner = {id(child) for module in modules for child in module.children()}
    return [module for module in modules if id(module) not in inner]


def _alive(kind: type) -> list[Any]:
    """Every live object of a class, the oldest first."""
    gc.collect()  # leaves all live objects in one list, the oldest first
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]
