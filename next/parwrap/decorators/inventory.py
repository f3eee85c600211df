"""What a function can reach when its scope opens: the optimizers and modules that were built before (contract, small print on passes)."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from parwrap.decorators.scope import Call, block_frame

__all__ = ["reachable"]

MOST = 1000
"""Containers that hold more are data, and are not looked into."""

T = TypeVar("T")


def reachable(kind: type[T] | tuple[type[T], ...], call: Call) -> list[T]:
    """The objects of ``kind`` among the arguments of a function, its ``self``, its closure and the globals that it names; for a ``with``
    block, among the variables around it. Objects and containers of up to 1,000 items are looked into one level deep.

    >>> sgd = torch.optim.SGD([torch.ones(1)])
    >>> reachable(torch.optim.Optimizer, Call(print, ({"optimizers": [sgd]},), {"other": sgd})) == [sgd]
    True
    """
    found: dict[int, T] = {}
    for value in _values(call):
        for member in (value, *_members(value)):
            for each in (member, *_members(member)) if isinstance(member, (list, tuple, dict)) else (member,):
                if isinstance(each, kind):
                    found[id(each)] = each
    return list(found.values())


def _values(call: Call) -> Iterator[Any]:
    if call.function is None:
        frame = block_frame()
        if frame is not None:
            yield from [*frame.f_locals.values(), *frame.f_globals.values()]
        return
    yield from [*call.args, *call.kwargs.values(), getattr(call.function, "__self__", None)]
    try:
        names = inspect.getclosurevars(inspect.unwrap(getattr(call.function, "__func__", call.function)))
    except TypeError:  # no Python function
        return
    yield from [*names.nonlocals.values(), *names.globals.values()]


def _members(value: Any) -> Collection[Any]:
    """What ``value`` holds: the items of a container, or the attributes of an object of the script."""
    if isinstance(value, (dict, list, tuple, set)):
        if len(value) > MOST:
            return ()
        return value.values() if isinstance(value, dict) else value
    if isinstance(value, (nn.Module, torch.Tensor, type)) or not hasattr(value, "__dict__") or inspect.ismodule(value):
        return ()
    return list(vars(value).values())
