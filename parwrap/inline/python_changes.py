"""Changes of the caller's Python objects that a function reaches: detects them on a rank and repeats them in the caller.

Each object keeps its identity: lists, dicts, attributes, arrays, closures and globals change in place. ``returned_state.py`` handles
tensors, models and optimizers; attributes that a user gives to models and optimizers are handled here.
"""

from __future__ import annotations

import array
import builtins
import datetime
import dis
import enum
import functools
import io
import logging
import operator
import pathlib
import queue
import random
import re
import sys
import threading
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, GeneratorType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from parwrap.inline.object_graph import attributes_of, is_users, is_users_module, within
from parwrap.torch_private.dataloader import BaseDataLoaderIter, batches_yielded
from parwrap.torch_private.modules import LAZY_HOOKS, MODULES

__all__ = ["Change", "Snapshot", "entry_name", "make_change", "objects_reached", "part_entries", "without_entries"]

MOST = 100_000
"""The maximum number of objects to watch, nearest first; this takes about a second."""
LARGEST = 1 << 30
"""The most bytes of an array to compare."""

PLAIN = {int, float, complex, bool, str, bytes, type(None)}
ATOMS = (*PLAIN, type(...), range, slice, np.generic, np.dtype, enum.Enum, pathlib.PurePath, re.Pattern)
DATES = (datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo)
TORCHS = (torch.dtype, torch.device, torch.Size, torch.layout)
CODE = (CodeType, CellType, BuiltinFunctionType)
CLOSED = (*ATOMS, *DATES, *TORCHS, *CODE, torch.Tensor, LRScheduler, threading.Thread, logging.Filterer, io.IOBase)
"""Objects that do not change, belong to one process, or are sent back in another way."""
CLOSED_MODULES = (
    *("parwrap", "IPython", "ipykernel", "zmq", "pytest", "_pytest", "pluggy"),
    *("multiprocessing", "concurrent", "asyncio", "weakref"),
)

STREAMS: dict[type, tuple[Callable, Callable, Callable]] = {
    torch.Generator: (lambda thing: thing.get_state().numpy().tobytes(), torch.Generator.get_state, torch.Generator.set_state),
    random.Random: (random.Random.getstate, random.Random.getstate, random.Random.setstate),
    np.random.RandomState: (
        lambda thing: repr(thing.get_state()),
        np.random.RandomState.get_state,
        np.random.RandomState.set_state,
    ),
    np.random.BitGenerator: (
        lambda thing: repr(thing.state),
        operator.attrgetter("state"),
        lambda thing, state: setattr(thing, "state", state),
    ),
}
"""How to compare, read and set the state of a random stream."""
GLOBAL_STREAMS = {id(random._inst), id(np.random.mtrand._rand), id(np.random.mtrand._rand._bit_generator), id(torch.default_generator)}
"""Random streams of which each rank has its own state."""

INTERNAL = "<internal>"

OPTIMIZERS_OWN = frozenset({"defaults", "state", "param_groups", "step"})
"""The optimizer's own attributes; a scheduler counts the steps in an attribute of ``step``."""

MODULES_OWN = frozenset({*vars(nn.Module()), *LAZY_HOOKS})

Change = tuple[int, str, Any]
"""The number of an object, its changed part, and the change."""


def objects_reached(function: Callable) -> Iterator[tuple[str, Any]]:
    """The objects that ``function`` reaches and could change, with the names by which it reaches them, the nearest first.

    The content of a private attribute of a library's object, such as a cache, has no name.

    >>> history = []
    >>> [name for name, each in objects_reached(lambda: history.append(1)) if each is history]
    ['history']
    """
    seen, left = {id(function)}, deque([("", function)])
    kept = []  # otherwise another object could get the id of a freed one
    while left:
        name, thing = left.popleft()
        yield name, thing
        kind = type(thing)
        is_library = kind not in (dict, list) and not is_users_module(kind.__module__)
        for inner_name, inner in _within(thing, name):
            if len(seen) >= MOST:
                break
            if id(inner) not in seen and not _is_closed(inner):
                seen.add(id(inner))
                kept.append(inner)
                is_internal = is_library and inner_name.startswith(f"{name}._")
                left.append((INTERNAL if is_internal else inner_name, inner))


def _is_closed(thing: Any) -> bool:
    kind = type(thing)
    if kind in PLAIN or (kind is tuple and PLAIN.issuperset(map(type, thing))):
        return True
    if issubclass(kind, CLOSED) or id(thing) in GLOBAL_STREAMS or thing is vars(builtins):
        return True
    if issubclass(kind, ModuleType):
        return not is_users_module(thing.__name__)
    if issubclass(kind, type):
        return not is_users_module(thing.__module__)
    if issubclass(kind, tuple(STREAMS)):
        return False
    module = str(kind.__module__)
    return module.partition(".")[0] in CLOSED_MODULES or (module.startswith("torch._") and not issubclass(kind, nn.Module))


def _within(thing: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The objects in ``thing``, known by ``name``, with their names."""
    kind = type(thing)
    if issubclass(kind, (ModuleType, type, nn.Module, DataLoader, Optimizer)):
        yield from ((f"{name}.{key}", value) for key, value in _attributes(thing).items())
        if issubclass(kind, nn.Module):
            yield from ((f"{name}.{key}", value) for key, value in vars(thing).get(MODULES, {}).items())
        if issubclass(kind, type):
            yield from within(thing, name)
    elif issubclass(kind, np.ndarray):
        yield from ((f"{name}[{index}]", each) for index, each in enumerate(thing.ravel().tolist() if thing.dtype == object else ()))
    elif issubclass(kind, BaseDataLoaderIter):
        return
    elif issubclass(kind, functools._lru_cache_wrapper):  # a missing cache is computed again
        yield f"{name}.__wrapped__", thing.__wrapped__
    else:
        if not (issubclass(kind, (list, tuple, set, deque)) and PLAIN.issuperset(map(type, thing))):
            yield from within(thing, name, sys.maxsize)
        if issubclass(kind, (dict, list, tuple)):
            yield from ((f"{name}.{key}", value) for key, value in _attributes(thing).items())
        yield f"type({name})", kind


def _attributes(thing: Any) -> dict[str, Any]:
    """The attributes that a user may give it, by name."""
    kind = type(thing)
    if issubclass(kind, (type, ModuleType)):
        entries = dict(vars(thing)).items()
        return {name: value for name, value in entries if not name.startswith("__") and not _is_code(value)}
    if kind is FunctionType:
        return {name: value for name, value in vars(thing).items() if not name.startswith("__")}
    attributes = attributes_of(thing)
    if issubclass(kind, nn.Module):
        return {name: value for name, value in attributes.items() if name not in MODULES_OWN}
    if issubclass(kind, Optimizer):
        return {name: value for name, value in attributes.items() if name not in OPTIMIZERS_OWN and name[0] != "_"}
    if issubclass(kind, DataLoader):
        return {name: value for name, value in attributes.items() if name[0] != "_"}
    return attributes.copy()


def _is_code(thing: Any) -> bool:
    return hasattr(type(thing), "__get__") or isinstance(thing, (type, ModuleType, staticmethod, classmethod, property))


def _slots(thing: Any) -> dict[str, Any]:
    """The values of its slots, by name."""
    values = {}
    for name, slot in _slots_of(type(thing)).items():
        with suppress(AttributeError):
            values[name] = slot.__get__(thing)
    return values


def _slots_of(kind: type) -> dict[str, Any]:
    with_slots = [base for base in reversed(kind.__mro__) if "__slots__" in vars(base)]
    return {name: slot for base in with_slots for name, slot in vars(base).items() if type(slot) is MemberDescriptorType}


def _stored_globals(function: FunctionType) -> set[str]:
    """The global names that a function assigns."""
    names, codes = set(), [function.__code__]
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
        if {STORE_GLOBAL, DELETE_GLOBAL} & set(code.co_code[::2]):
            names |= {each.argval for each in dis.get_instructions(code) if each.opcode in (STORE_GLOBAL, DELETE_GLOBAL)}
    return names


STORE_GLOBAL, DELETE_GLOBAL = dis.opmap["STORE_GLOBAL"], dis.opmap["DELETE_GLOBAL"]


def _contents(thing: Any) -> dict[str, Any]:
    """A copy of the present content of ``thing``, by part."""
    kind = type(thing)
    if kind is dict:
        return {"items": thing.copy()}
    if kind is list:
        return {"list": thing.copy()}
    if kind is FunctionType:
        if not is_users(thing):
            return {}
        names = _stored_globals(thing)
        values = {name: thing.__globals__[name] for name in names if name in thing.__globals__}
        return ({"globals": values} if names else {}) | {"closure": _closure(thing), "attributes": _attributes(thing)}
    if issubclass(kind, (MethodType, tuple, frozenset)) and not attributes_of(thing):
        return {}
    for stream, (compared, _, _) in STREAMS.items():
        if issubclass(kind, stream):
            return {"stream": compared(thing)}
    if issubclass(kind, np.ndarray):
        return _content_of_array(thing)
    if issubclass(kind, (bytearray, array.array)):
        return {"value": bytes(thing)}
    parts: dict[str, Any] = {}
    if issubclass(kind, dict):
        parts["items"] = dict((OrderedDict if issubclass(kind, OrderedDict) else dict).items(thing))
    elif issubclass(kind, list):
        parts["list"] = list(list.__iter__(thing))
    elif issubclass(kind, deque):
        parts["deque"] = list(thing)
    elif issubclass(kind, set):
        parts["set"] = set(thing)
    elif (position := _position(thing)) is not None:
        return {"position": position}
    if issubclass(kind, BaseDataLoaderIter):
        return parts
    attributes = attributes_of(thing)
    if attributes is not thing and (attributes or _has_attributes(thing)):
        parts["attributes"] = _attributes(thing)
    if _slots_of(kind):
        parts["attributes"] = parts.get("attributes", {}) | _slots(thing)
    return parts


def _has_attributes(thing: Any) -> bool:
    return hasattr(type(thing), "__dict__") and hasattr(thing, "__dict__")


def _closure(function: FunctionType) -> dict[str, Any]:
    """The values of its closure variables; if two functions share a cell, both list it."""
    values = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # it has no value yet
            values[name] = cell.cell_contents
    return values


def _content_of_array(thing: np.ndarray) -> dict[str, Any]:
    if thing.dtype == object:
        return {"elements": thing.ravel().tolist()}
    if isinstance(thing, np.memmap) or thing.nbytes > LARGEST or thing.dtype.hasobject or not thing.flags.writeable:
        return {}
    return {"value": (thing.shape, zlib.crc32(np.ascontiguousarray(thing).view(np.uint8).data) if thing.size else 0)}


def _position(thing: Any) -> Any:
    """The position of an iterator or the size of a queue, which can be read but not set; ``None`` for other objects."""
    if isinstance(thing, GeneratorType):
        return thing.gi_frame.f_lasti if thing.gi_frame else "at its end"
    if isinstance(thing, queue.SimpleQueue):
        return thing.qsize()
    if isinstance(thing, BaseDataLoaderIter):
        return batches_yielded(thing)
    kind = type(thing)
    if kind.__module__ in ("builtins", "itertools") and hasattr(kind, "__next__"):
        return operator.length_hint(thing, -1), repr(thing)
    return None


class Snapshot:
    """The content of objects at one time.

    Args:
        things: the objects, by number.
    """

    def __init__(self, things: dict[int, Any]) -> None:
        self._things = things
        self._before = {key: contents for key, thing in things.items() if (contents := _contents(thing))}

    def changes(self) -> tuple[list[Change], list[tuple[int, str]]]:
        """The present differences, and the objects whose differences cannot be expressed."""
        changed: list[Change] = []
        for key, before in self._before.items():
            now = _contents(self._things[key])
            for part in dict.fromkeys([*before, *now]):
                change = _changed(part, self._things[key], before.get(part), now.get(part))
                if change is not None:
                    changed.append((key, part, change))
        return [each for each in changed if each[1] != "position"], [each[:2] for each in changed if each[1] == "position"]


MAPPINGS = ("attributes", "items", "globals", "closure")


def _changed(part: str, thing: Any, before: Any, now: Any) -> Any:
    """The change of ``part`` of ``thing`` from ``before`` to ``now``; ``None`` if there is none."""
    if part in MAPPINGS:
        before, now = before or {}, now or {}
        removed = [name for name in before if name not in now]
        changed = {name: value for name, value in now.items() if name not in before or before[name] is not value}
        kept = [name for name in before if name in now]
        if part == "items" and list(now) != kept + [name for name in now if name not in before]:  # in another order
            removed, changed = list(before), dict(now)
        return (removed, changed) if removed or changed else None
    if part in ("list", "deque", "elements"):
        same = next((at for at, (old, new) in enumerate(zip(before, now, strict=False)) if old is not new), min(len(before), len(now)))
        return None if same == len(before) == len(now) else (same, now[same:])
    if part == "set":
        return None if before == now else (before - now, now - before)
    if before == now:
        return None
    if part == "value":
        return np.array(thing, subok=True) if isinstance(thing, np.ndarray) else bytes(thing) if isinstance(thing, bytearray) else thing[:]
    if part == "stream":
        return next(read(thing) for kind, (_, read, _) in STREAMS.items() if isinstance(thing, kind))
    return True


def make_change(thing: Any, part: str, change: Any) -> None:
    """Repeat a change that :meth:`Snapshot.changes` has found on the rank, in ``part`` of ``thing``."""
    kind = type(thing)
    if part in MAPPINGS:
        set_entry, remove = _ways_to_set(thing, part)
        removed, changed = change
        for name in removed:
            with suppress(AttributeError, KeyError):
                remove(name)
        for name, value in changed.items():
            set_entry(name, value)
    elif part == "list":
        same, rest = change
        list.__setitem__(thing, slice(same, None), rest)
    elif part == "deque":
        same, rest = change
        while len(thing) > same:
            thing.pop()
        thing.extend(rest)
    elif part == "elements":
        same, rest = change
        for at, each in enumerate(rest, same):
            thing.flat[at] = each
    elif part == "set":
        removed, new = change
        set.difference_update(thing, removed)
        set.update(thing, new)
    elif part == "stream":
        next(write(thing, change) for each, (_, _, write) in STREAMS.items() if issubclass(kind, each))
    elif issubclass(kind, np.ndarray):
        if thing.shape != change.shape:
            thing.resize(change.shape, refcheck=False)
        thing[...] = change
    else:
        thing[:] = change


def _ways_to_set(thing: Any, part: str) -> tuple[Callable[[Any, Any], None], Callable[[Any], None]]:
    """Two functions: one sets an entry of ``part``, one removes it."""
    if part == "items":
        base: Any = OrderedDict if isinstance(thing, OrderedDict) else dict
        return functools.partial(base.__setitem__, thing), functools.partial(base.__delitem__, thing)
    if part == "globals":
        return thing.__globals__.__setitem__, thing.__globals__.__delitem__
    if part == "closure":
        cells = dict(zip(thing.__code__.co_freevars, thing.__closure__, strict=True))
        return lambda name, value: setattr(cells[name], "cell_contents", value), lambda name: delattr(cells[name], "cell_contents")
    if isinstance(thing, type):
        return functools.partial(type.__setattr__, thing), functools.partial(type.__delattr__, thing)
    if _slots_of(type(thing)):  # a class that was sent may have attributes instead
        return functools.partial(object.__setattr__, thing), functools.partial(object.__delattr__, thing)
    return vars(thing).__setitem__, vars(thing).__delitem__


def entry_name(thing: Any, name: str, part: str, entry: Any) -> str | None:
    """The name of an entry of ``part`` of ``thing``, known by ``name``; ``None`` for private entries of a library."""
    is_library = not is_users_module(type(thing).__module__)
    if name.startswith(INTERNAL) or (part == "attributes" and is_library and str(entry).startswith("_")):
        return None
    if part == "attributes":
        return f"{name}.{entry}"
    if part in ("globals", "closure"):
        return str(entry)
    return f"{name}[{entry!r}]" if part == "items" and isinstance(entry, (str, int)) else name


def part_entries(part: str, change: Any) -> dict[Any, Any]:
    """The parts of a change to send, by entry; a change without entries is one part."""
    return change[1] if part in MAPPINGS else {None: change}


def without_entries(part: str, change: Any, entries: Iterable[Any]) -> Any:
    """A change without ``entries``; ``None`` if nothing is left."""
    left_out = set(entries)
    if part not in MAPPINGS:
        return None if left_out else change
    removed, changed = change
    rest = {name: value for name, value in changed.items() if name not in left_out}
    return ([name for name in removed if name not in left_out], rest) if removed or rest else None
