"""An optimizer on its way from a worker to a parameter server: the user's own object, with other tensors in the place of its parameters.

Its class is found by name on the other side, so the server must have come as far in the script. State goes back the same way.
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
    """``optimizer`` without the values of its parameters, and without hooks and what schedulers have put around its step.

    Raises:
        Exception: whatever pickle raises for something in it that it cannot carry, such as a local class or a lambda.
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
    """The optimizer that was ``packed``, of these ``parameters``."""

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, identity: Any) -> torch.Tensor:
            return parameters[identity[1]]

    kind, plain = Unpickler(io.BytesIO(sent)).load()
    optimizer = object.__new__(kind)
    optimizer.__setstate__(plain)
    return optimizer


def options_of(optimizer: Optimizer, lr_factor: float = 1.0) -> list[dict[str, Any]]:
    """What is in each group of ``optimizer`` beside the parameters, with learning rates times ``lr_factor``."""
    groups = group_options(optimizer)
    return groups if lr_factor == 1.0 else [{**group, "lr": group["lr"] * lr_factor} if "lr" in group else group for group in groups]


def set_options(optimizer: Optimizer, options: Sequence[dict[str, Any]]) -> None:
    """Give the groups of ``optimizer`` what another's have."""
    for group, given in zip(optimizer.param_groups, options, strict=True):
        group.update(given)


def state_of(optimizer: Optimizer, places: Sequence[int] | None = None) -> dict[int, dict[str, Any]]:
    """What ``optimizer`` keeps of its parameters, by their place in it; of those at ``places``, or of all."""
    kept = {place: optimizer.state.get(p) for place, p in enumerate(parameters_of(optimizer))}
    return {place: state for place, state in kept.items() if state and (places is None or place in places)}


def set_state(optimizer: Optimizer, state: dict[int, dict[str, Any]], places: Sequence[int] | None = None) -> None:
    """Have ``optimizer`` go on from ``state``, as far as it is of the parameters at ``places``; of all by default."""
    for place, p in enumerate(parameters_of(optimizer)):
        if places is None or place in places:
            optimizer.state.pop(p, None)
            if place in state:
                optimizer.state[p] = {name: _beside(value, p) for name, value in state[place].items()}


def _beside(value: Any, parameter: torch.Tensor) -> Any:
    """What is as large as the parameter is kept on its device; counters stay where they were."""
    return value.to(parameter.device) if isinstance(value, torch.Tensor) and value.dim() else value
