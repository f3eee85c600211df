"""The state of sharded models and their optimizers: whole where a script sees it, and in parts where it is used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from parwrap.strategies.fsdp.sharded_tensors import is_sharded, sharded_like
from parwrap.torch_private.fsdp import local_tensor

__all__ = ["adopt", "holds_sharded", "release", "shard_state", "whole_state"]

Whole = Callable[[Any], torch.Tensor]

DEPTH, MOST = 4, 1000
"""How deep to search nested containers that are being saved, and how many items of a list."""


def whole_state(state: Mapping[str, Any], whole: Whole) -> dict[str, Any]:
    """The ``state`` of an optimizer or a model with whole tensors; a tensor that occurs several times stays one object."""
    seen: dict[Any, torch.Tensor] = {}

    def made(value: Any) -> Any:
        if isinstance(value, DTensor):
            # parameters are padded, so they have memory on every rank; a state tensor may have none here, but occurs only once
            key = local_tensor(value).untyped_storage().data_ptr() or id(value)
            if key not in seen:
                seen[key] = whole(value.detach())
            return seen[key]
        if isinstance(value, dict):
            return {name: made(each) for name, each in value.items()}
        return type(value)(made(each) for each in value) if type(value) in (list, tuple) else value

    return {name: made(value) for name, value in state.items()}


def shard_state(optimizer: Optimizer) -> None:
    """Keep this rank's part of a state that was loaded, or made before the model was sharded."""
    for p, state in optimizer.state.items():
        if is_sharded(p):
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and not is_sharded(value) and value.dim() and value.shape == p.shape:
                    state[name] = sharded_like(value, p)


def adopt(optimizer: Optimizer, sharded: Mapping[int, torch.Tensor]) -> None:
    """Replace the parameters of ``optimizer`` with the ``sharded`` ones, found by the ids of the originals."""
    _exchange(optimizer, lambda p: sharded.get(id(p), p))
    shard_state(optimizer)


def release(optimizer: Optimizer, plain: Mapping[int, nn.Parameter], whole: Whole) -> None:
    """Give ``optimizer`` the plain parameters again, with whole states; called on all ranks."""
    known = dict(plain)

    def of(p: torch.Tensor) -> torch.Tensor:
        if not isinstance(p, DTensor):
            return p
        if id(p) not in known:  # its model no longer exists
            known[id(p)] = nn.Parameter(whole(p.detach()).clone(), p.requires_grad)
        return known[id(p)]

    _exchange(optimizer, of)
    for p, state in optimizer.state.items():
        optimizer.state[p] = whole_state(state, whole)


def _exchange(optimizer: Optimizer, of: Callable[[torch.Tensor], torch.Tensor]) -> None:
    states = list(optimizer.state.items())
    for group in optimizer.param_groups:
        group["params"][:] = [of(p) for p in group["params"]]  # keep the list object, because an optimizer may refer to it by another name
    optimizer.state.clear()
    for p, state in states:
        optimizer.state[of(p) if isinstance(p, torch.Tensor) else p] = state


def holds_sharded(thing: Any, models: Iterable[nn.Module], depth: int = DEPTH) -> bool:
    """Whether ``thing``, which is about to be saved, contains sharded tensors or one of the ``models``."""
    if isinstance(thing, nn.Module):
        inside = {id(module) for module in thing.modules()}
        return any(id(module) in inside for model in models for module in model.modules())
    if is_sharded(thing):
        return True
    if isinstance(thing, Mapping):
        return depth > 0 and any(holds_sharded(each, models, depth - 1) for each in thing.values())
    if isinstance(thing, (list, tuple, set)):
        return depth > 0 and any(holds_sharded(each, models, depth - 1) for each in islice(thing, MOST))
    if isinstance(thing, Optimizer):
        return any(is_sharded(p) for group in thing.param_groups for p in group["params"])
    attributes = getattr(thing, "__dict__", None)
    return bool(attributes) and not isinstance(thing, type) and depth > 0 and holds_sharded(attributes, models, depth - 1)
