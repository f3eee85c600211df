"""Sends an optimizer from a worker to a parameter server: the user's own object, with other tensors in place of its parameters.

The server finds its class by name, so it must have reached the same place in the script. State is sent back in the same way.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from parwrap.loop.loop_state import group_options, parameters_of

__all__ = ["options_of", "packed", "set_options", "set_state", "state_of", "unpacked"]

PARAMETER = "parameter"


def packed(optimizer: Optimizer) -> bytes:
    """Pickle ``optimizer`` without its parameters' values, its hooks, and the wrappers that schedulers put around its step.

    Raises:
        Exception: whatever pickle raises for an unpicklable object in it, such as a local class or a lambda.
    """
    place_of = {id(p): place for place, p in enumerate(parameters_of(optimizer))}

    class Pickler(pickle.Pickler):
        def persistent_id(self, thing: Any) -> Any:
            return (PARAMETER, place_of[id(thing)]) if id(thing) in place_of else None

    plain = {name: value for name, value in vars(optimizer).items() if not (name == "step" or "hook" in name)}
    stream = io.BytesIO()
    Pickler(stream).dump((type(optimizer), plain))
    return stream.getvalue()


def unpacked(sent: bytes, parameters: Sequence[torch.Tensor]) -> Optimizer:
    """The optimizer that was ``packed``, with these ``parameters``."""

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, identity: Any) -> torch.Tensor:
            return parameters[identity[1]]

    kind, plain = Unpickler(io.BytesIO(sent)).load()
    optimizer = object.__new__(kind)
    optimizer.__setstate__(plain)
    return optimizer


def options_of(optimizer: Optimizer, lr_factor: float = 1.0) -> list[dict[str, Any]]:
    """The options of each group of ``optimizer``, with learning rates times ``lr_factor``."""
    groups = group_options(optimizer)
    return groups if lr_factor == 1.0 else [{**group, "lr": group["lr"] * lr_factor} if "lr" in group else group for group in groups]


def set_options(optimizer: Optimizer, options: Sequence[dict[str, Any]]) -> None:
    """Copy another optimizer's group options to the groups of ``optimizer``."""
    for group, given in zip(optimizer.param_groups, options, strict=True):
        group.update(given)


def state_of(optimizer: Optimizer, places: Sequence[int] | None = None) -> dict[int, dict[str, Any]]:
    """The state of ``optimizer``, by position, for the parameters at ``places``; for all by default."""
    kept = {place: optimizer.state.get(p) for place, p in enumerate(parameters_of(optimizer))}
    return {place: state for place, state in kept.items() if state and (places is None or place in places)}


def set_state(optimizer: Optimizer, state: dict[int, dict[str, Any]], places: Sequence[int] | None = None) -> None:
    """Make ``optimizer`` continue from ``state``, for the parameters at ``places``; all by default."""
    for place, p in enumerate(parameters_of(optimizer)):
        if places is None or place in places:
            optimizer.state.pop(p, None)
            if place in state:
                optimizer.state[p] = {name: _on_device_of(value, p) for name, value in state[place].items()}


def _on_device_of(value: Any, parameter: torch.Tensor) -> Any:
    """Move a tensor with dimensions to the device of ``parameter``; counters stay where they are."""
    return value.to(parameter.device) if isinstance(value, torch.Tensor) and value.dim() else value
