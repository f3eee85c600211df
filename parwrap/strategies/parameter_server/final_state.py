"""The final state of worker 0, which the other ranks copy: values, state of optimizers and schedulers, and the function's result."""

from __future__ import annotations

import pickle
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from parwrap.coordination.call_site import warn
from parwrap.loop.loop_state import Loop
from parwrap.strategies.common.state_transfer import optimizers_and_schedulers, tensors_by_name
from parwrap.strategies.parameter_server.optimizer_transfer import options_of, set_options, set_state, state_of

__all__ = ["FinalState", "final_state_of", "take_over"]


class FinalState(NamedTuple):
    """The final state of a run.

    Attributes:
        tensors: parameters and buffers, by name.
        states: the states of optimizers and schedulers, by number, pickled.
        result: the function's result, pickled; ``None`` if it does not pickle.
    """

    tensors: dict[Any, torch.Tensor]
    states: dict[Any, bytes]
    result: bytes | None


def final_state_of(loop: Loop, result: Any) -> FinalState:
    """The final state of this process; its optimizers must have their state already."""
    tensors = {name: t.detach().cpu() for name, t in tensors_by_name(loop, {}).items() if t.layout == torch.strided}
    states = {}
    for name, each in optimizers_and_schedulers(loop).items():
        with suppress(Exception):  # a scheduler may hold objects that do not pickle
            states[name] = pickle.dumps((state_of(each), options_of(each)) if isinstance(each, Optimizer) else each.state_dict())
    return FinalState(tensors, states, _pickled(result))


def take_over(loop: Loop, end: FinalState, states: bool = False) -> None:
    """Copy the tensors of ``end`` to this process's tensors of the same names; with ``states``, load optimizers and schedulers too."""
    mine = tensors_by_name(loop, {})
    with torch.no_grad():
        for name, value in end.tensors.items():
            if name in mine and mine[name].shape == value.shape:
                mine[name].data.copy_(value)
    for name, each in optimizers_and_schedulers(loop).items() if states else ():
        if name not in end.states:
            continue
        content = pickle.loads(end.states[name])
        if not isinstance(each, Optimizer):
            each.load_state_dict(content)
        elif len(each.param_groups) == len(content[1]):
            set_state(each, content[0])
            set_options(each, content[1])


def _pickled(result: Any) -> bytes | None:
    try:
        return pickle.dumps(result)
    except Exception as error:
        warn(f"parwrap: the result of the function cannot be sent to the parameter servers, which end without it: {error}.")
        return None
