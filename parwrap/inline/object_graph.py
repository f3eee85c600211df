"""The objects that a function reaches, with their names: arguments, closure variables, the globals that it uses, and their content."""

from __future__ import annotations

import gc
import inspect
import os
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from parwrap.patching.imported_names import is_installed

__all__ = ["attributes_of", "found_by", "is_users", "is_users_module", "within"]

MOST, ENTRIES = 50_000, 1_000
"""The maximum number of objects to examine, nearest first, and of entries per object. This takes 0.1 to 0.2 seconds."""

LIBRARIES = tuple({os.path.join(path, "") for name in ("stdlib", "platstdlib", "purelib", "platlib") if (path := sysconfig.get_path(name))})
OURS = os.path.join(os.path.dirname(__file__), "")


def found_by(
    function: Callable, wanted: Callable[[Any], bool], opened: Callable[[Any], bool] = lambda thing: True
) -> Iterator[tuple[str, Any]]:
    """The ``wanted`` objects that ``function`` reaches, with the names by which it reaches them, the nearest first.

    Args:
        function: anything that can be called.
        wanted: whether an object is looked for.
        opened: whether to look into an object.

    >>> lists = {"first": [1, 2]}
    >>> list(found_by(lambda: lists, lambda thing: isinstance(thing, list)))
    [("lists['first']", [1, 2])]
    """
    seen, left = {id(function)}, deque([("", function)])
    kept = []  # or another object could get the id of a freed one
    while left and len(seen) < MOST:
        name, thing = left.popleft()
        if wanted(thing):
            yield name, thing
        elif opened(thing):
            for inner in within(thing, name):
                if id(inner[1]) not in seen and (gc.is_tracked(inner[1]) or wanted(inner[1])):
                    seen.add(id(inner[1]))
                    kept.append(inner[1])
                    left.append(inner)


def within(thing: Any, name: str = "", most: int = ENTRIES) -> Iterator[tuple[str, Any]]:
    """The objects in ``thing``, known by ``name``, with their names.

    For a class, these are the user's methods; for modules and tensors, none.

    Args:
        thing: any object.
        name: its name.
        most: the most entries to examine.
    """
    kind = type(thing)
    if issubclass(kind, (ModuleType, CodeType, torch.Tensor)):
        return
    if issubclass(kind, type):
        methods = [each for base in type.mro(thing) for each in list(vars(base).values()) if type(each) is FunctionType]
        yield from ((name, each) for each in methods if is_users(each))
        return
    if kind is FunctionType:
        yield from _names_in(thing)
    elif kind is MethodType:
        yield name, thing.__func__
        yield "self", thing.__self__
    elif kind is partial:
        yield name, thing.func
        yield from zip(_parameters(thing.func, len(thing.args)), thing.args, strict=True)
        yield from thing.keywords.items()
    elif issubclass(kind, dict):
        entries = list(islice(dict.items(thing), most))  # copied in one go, since a thread may change it
        yield from ((f"{name}[{key!r}]" if isinstance(key, (str, int)) else name, value) for key, value in entries)
    elif issubclass(kind, (list, tuple)):
        items = (list if issubclass(kind, list) else tuple).__iter__(thing)
        yield from ((f"{name}[{index}]", each) for index, each in enumerate(islice(items, most)))
    else:
        attributes = attributes_of(thing)
        entries = list(islice(attributes.items(), most))
        yield from ((f"{name}.{key}", value) for key, value in entries)
        known = {id(attributes), *(id(value) for _, value in entries)}
        yield from ((name, each) for each in gc.get_referents(thing)[:most] if id(each) not in known)


def attributes_of(thing: Any) -> dict[str, Any]:
    """The ``__dict__`` of ``thing`` itself, not a copy; empty if it has none."""
    try:
        attributes = object.__getattribute__(thing, "__dict__")
    except (AttributeError, TypeError):
        return {}
    return attributes if type(attributes) is dict else {}


def _names_in(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The closure variables and defaults of a function, and, for a user's function, the globals that it uses."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # has none yet
            continue
    defaults = function.__defaults__ or ()
    yield from zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
    if "__wrapped__" in vars(function):
        yield "", vars(function)["__wrapped__"]
    if is_users(function):
        names = sorted(set(_used(code)) & function.__globals__.keys())
        yield from ((name, function.__globals__[name]) for name in names)


def _used(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _used(inner)


def is_users(function: FunctionType) -> bool:
    """Whether ``function`` belongs neither to a library nor to parwrap."""
    return _is_users_file(function.__code__.co_filename)


def is_users_module(name: str) -> bool:
    """Whether the module of that name is imported, and belongs neither to a library nor to parwrap."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    return name == "__main__" or (file is not None and _is_users_file(file))


def _is_users_file(file: str) -> bool:
    # environments may also contain packages of other environments
    return not (file.startswith((OURS, *LIBRARIES)) or "<frozen" in file or is_installed(file))


def _parameters(function: Any, count: int) -> list[str]:
    """The names of the first ``count`` positional arguments of ``function``."""
    try:
        names = [name for name, each in inspect.signature(function).parameters.items() if each.kind <= each.POSITIONAL_OR_KEYWORD]
    except (TypeError, ValueError):
        names = []
    return [names[number] if number < len(names) else f"argument {number + 1}" for number in range(count)]
