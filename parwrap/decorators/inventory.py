"""What a function can reach by name: the optimizers and modules that were built before its scope opens (contract, small print on passes).

For a call that starts ranks, this file also finds everything else that the function can reach.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from inspect import Parameter
from types import CodeType, FunctionType
from typing import Any, TypeVar

import torch
from torch import nn

from parwrap.decorators.scope import Call, block_frame
from parwrap.inline.returned import attributes_of

__all__ = ["found", "named", "reachable"]

MOST = 1000
"""A container with more items counts as data, and is not searched."""

T = TypeVar("T")


def reachable(kind: type[T] | tuple[type[T], ...], call: Call) -> list[T]:
    """The objects of ``kind`` among what a function can reach by name; for a ``with`` block, among the variables around it.

    Objects of the script and containers of up to 1,000 items are searched, and so are the lists, tuples and dicts in them.

    >>> sgd = torch.optim.SGD([torch.ones(1)])
    >>> reachable(torch.optim.Optimizer, Call(print, ({"optimizers": [sgd]},), {"other": sgd})) == [sgd]
    True
    """
    if call.function is not None:
        return found(kind, named(call).values())
    frame = block_frame()
    return [] if frame is None else found(kind, [*frame.f_locals.values(), *frame.f_globals.values()])


def found(kind: type[T] | tuple[type[T], ...], values: Iterable[Any]) -> list[T]:
    """The objects of ``kind`` among ``values``, among what these hold, and in lists, tuples and dicts there."""
    there: dict[int, T] = {}
    for value in values:
        for member in (value, *_members(value)):
            for each in (member, *_members(member)) if isinstance(member, (list, tuple, dict)) else (member,):
                if isinstance(each, kind):
                    there[id(each)] = each
    return list(there.values())


def _members(value: Any) -> Collection[Any]:
    """What ``value`` holds: the items of a container, or the attributes of an object of the script."""
    if isinstance(value, (dict, list, tuple, set)):
        if len(value) > MOST:
            return ()
        return value.values() if isinstance(value, dict) else value
    if isinstance(value, (nn.Module, torch.Tensor, type)) or inspect.ismodule(value):
        return ()
    return list(attributes_of(value).values())


def named(call: Call) -> dict[str, Any]:
    """What a function can reach, by name: its arguments, its ``self``, its closure and the globals that it names.

    Functions and classes of its module that it names, and their base classes there, count as its own code.

    >>> def train(model, *, epochs=2):
    ...     return MOST
    >>> named(Call(train, ("model",)))
    {'model': 'model', 'MOST': 1000}
    """
    function: Any = call.function
    args, kwargs = call.args, call.kwargs
    while isinstance(function, partial):
        function, args, kwargs = function.func, (*function.args, *args), {**function.keywords, **kwargs}
    names = _arguments(function, args, kwargs)
    itself = getattr(function, "__self__", names.get("self") if isinstance(function, FunctionType) else function)
    if itself is not None and not inspect.ismodule(itself):
        names["self"] = itself
    module = getattr(function, "__module__", None)
    code, seen = [*_code(function, module), *_code(itself, module)], set[int]()
    while code:
        each = code.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        for name, value in _used(each):
            names.setdefault(name, value)
            code += _code(value, module)
    return names


def _arguments(function: Any, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name."""
    names: dict[str, Any] = {}
    try:
        signature = inspect.signature(function)
        given = signature.bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # the call will say so, or it is a builtin
        return {f"argument {index}": value for index, value in enumerate(args)} | dict(kwargs)
    for name, value in given.items():
        kind = signature.parameters[name].kind
        several = {f"{name}[{index}]": each for index, each in enumerate(value)} if kind is Parameter.VAR_POSITIONAL else {name: value}
        names |= value if kind is Parameter.VAR_KEYWORD else several
    return names


def _used(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The variables of the closure of ``function``, and the globals that it names, also in the functions and classes inside it."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # the variable has no value yet
            yield name, cell.cell_contents
    code = [function.__code__]
    for each in code:
        code += [inner for inner in each.co_consts if isinstance(inner, CodeType)]
        yield from ((name, function.__globals__[name]) for name in each.co_names if name in function.__globals__)


def _code(value: Any, module: str | None) -> Iterator[FunctionType]:
    """The functions in ``value``, a function, method, class or object, whose code is defined in ``module``."""
    value = getattr(value, "__func__", value)
    if isinstance(value, FunctionType):
        plain = inspect.unwrap(value)
        functions = [plain] if getattr(plain, "__module__", None) == module else []
    else:
        kinds = (value if isinstance(value, type) else type(value)).__mro__
        functions = [getattr(each, "__func__", each) for kind in kinds if kind.__module__ == module for each in vars(kind).values()]
    for each in functions:
        if isinstance(each, FunctionType) and isinstance(plain := inspect.unwrap(each), FunctionType):
            yield plain
