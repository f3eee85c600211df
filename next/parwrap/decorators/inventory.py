"""What a function can reach when its scope opens: the optimizers and modules that were built before (contract, small print on passes)."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import nn

from parwrap.decorators.scope import Call

__all__ = ["reachable"]

T = TypeVar("T")


def reachable(kind: type[T], call: Call) -> list[T]:
    """The objects of ``kind`` among the arguments of a function, its ``self``, its closure and the globals that it names; for a ``with``
    block, among the variables around it. Containers and objects are looked into one level deep.

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
        frame = _block()
        if frame is not None:
            yield from [*frame.f_locals.values(), *frame.f_globals.values()]
        return
    yield from [*call.args, *call.kwargs.values(), getattr(call.function, "__self__", None)]
    try:
        names = inspect.getclosurevars(inspect.unwrap(getattr(call.function, "__func__", call.function)))
    except TypeError:  # no Python function
        return
    yield from [*names.nonlocals.values(), *names.globals.values()]


def _block() -> FrameType | None:
    """The frame whose ``with`` block opens the scope."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("contextlib", "parwrap"):
        frame = frame.f_back
    return frame


def _members(value: Any) -> Iterable[Any]:
    """What ``value`` holds: the items of a container, or the attributes of an object of the script."""
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple, set)):
        return list(value)
    if isinstance(value, (nn.Module, torch.Tensor, type)) or not hasattr(value, "__dict__") or inspect.ismodule(value):
        return ()
    return list(vars(value).values())
