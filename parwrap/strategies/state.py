"""Taking over another rank's state of training: what a rank needs that has missed steps and goes on with the others.

Parameters with their gradients, buffers of the models around them, optimizers and schedulers. What a script keeps in variables of its own
(a step counter, a copy of the weights for averaging) is not known here. Rare, so it is simple rather than fast.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from parwrap.collectives import CPU
from parwrap.group import Group
from parwrap.loop import Loop

__all__ = ["take_state"]


@torch.no_grad()
def take_state(group: Group, loop: Loop, averaged: Mapping[tuple[int, int], torch.Tensor], source: int) -> None:
    """Make this rank's state that of rank ``source``; called on all ranks, and changes nothing on that one.

    Args:
        group: the process group.
        loop: knows the optimizers that are alive.
        averaged: the parameters whose gradients are averaged, numbered alike on all ranks; an optimizer may be gone by now.
        source: a rank that has missed nothing.
    """
    mine = group.world.rank == source
    parameters: dict[Any, torch.Tensor] = {("averaged", number): p for number, p in averaged.items()}
    parameters |= {("owned", number): p for number, p in loop.owned().items()}
    name_of = {id(p): name for name, p in reversed(parameters.items())}  # the first name of each
    tensors = dict(parameters) | _buffers(name_of)
    gradients = {name: p.grad for name, p in parameters.items()}
    objects = _optimizers_and_schedulers(loop)

    layout = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items() if name_of.get(id(tensor), name) == name]
    graded = [(name, p.shape, p.dtype) for name, p in parameters.items() if name_of[id(p)] == name and p.grad is not None]
    box: list[Any] = [layout, graded, {name: each.state_dict() for name, each in objects.items()}] if mine else [None] * 3
    dist.broadcast_object_list(box, source)
    layout, graded, states = box

    values = _broadcast(group, tensors if mine else None, layout, source)
    grads = _broadcast(group, gradients if mine else None, graded, source)
    if mine:
        return
    for name, value in values.items():
        if name in tensors and tensors[name].shape == value.shape:
            tensors[name].data.copy_(value)
    for p in parameters.values():
        if name_of[id(p)] in values:
            grad = grads.get(name_of[id(p)])
            p.grad = None if grad is None else grad.to(p)
    for name, state in states.items():
        if name in objects:
            objects[name].load_state_dict(state)


def _broadcast(group: Group, tensors: Mapping[Any, Any] | None, layout: list[Any], source: int) -> dict[Any, torch.Tensor]:
    """The tensors of ``layout`` as rank ``source`` has them; ``tensors`` are given there."""
    home = group.device if group.backend == "nccl" else CPU
    received = {}
    for name, shape, dtype in layout:
        received[name] = torch.empty(shape, dtype=dtype, device=home) if tensors is None else tensors[name].to_dense().to(home, copy=True)
        dist.broadcast(received[name], source)
    return received


def _buffers(name_of: Mapping[int, Any]) -> dict[Any, torch.Tensor]:
    """The buffers of every module that has parameters with a name, by the first of these and the buffer's own."""
    found: dict[Any, torch.Tensor] = {}
    for module in _alive(nn.Module):
        names = [name_of[id(p)] for p in module.parameters() if id(p) in name_of]
        if names:
            found |= {("buffer", names[0], len(names), name): buffer for name, buffer in module.named_buffers()}
    return found


def _optimizers_and_schedulers(loop: Loop) -> dict[Any, Any]:
    """By the number of the optimizer, and of the scheduler among those of its optimizer, in the order of age."""
    found: dict[Any, Any] = {}
    schedulers = _alive(LRScheduler)
    for number, optimizer in enumerate(loop.optimizers()):
        found[number] = optimizer
        own = [scheduler for scheduler in schedulers if getattr(scheduler, "optimizer", None) is optimizer]
        found |= {(number, place): scheduler for place, scheduler in enumerate(own)}
    return found


def _alive(kind: type) -> list[Any]:
    """Every living object of a class, the oldest first."""
    gc.collect()  # which leaves all that is alive in one list, the oldest first
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]
