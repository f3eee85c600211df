"""What rank 0 sends back: the function's result, and the new state of the caller's tensors, models, optimizers and the like (``KINDS``).

The caller and rank 0 have the same objects in the same order. Sent data refers to these objects by number, so a model that the caller
passed in is the same object when it is returned.
"""

from __future__ import annotations

import pickle
import random
import sys
import warnings
from array import array
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, islice
from pathlib import Path
from types import FunctionType, MemberDescriptorType, ModuleType
from typing import Any, BinaryIO
from zlib import crc32

import numpy as np
import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from parwrap.places import is_installed, is_ours, is_standard, script_place
from parwrap.ranks.device import cuda_has_started
from parwrap.torch_private.modules import CONTENTS
from parwrap.torch_private.tensors import version_of

__all__ = ["KINDS", "STATES", "CallersObjects", "attributes_of", "contents", "differing", "is_of_script", "warn_of_changes"]

STATES: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    LRScheduler: (lambda each: each.state_dict(), lambda each, state: each.load_state_dict(state)),
    GradScaler: (lambda each: each.state_dict(), lambda each, state: each.load_state_dict(state)),
    torch.Generator: (lambda each: each.get_state().tolist(), lambda each, state: each.set_state(torch.tensor(state, dtype=torch.uint8))),
    np.random.Generator: (lambda each: each.bit_generator.state, lambda each, state: setattr(each.bit_generator, "state", state)),
    np.random.RandomState: (lambda each: each.get_state(), lambda each, state: each.set_state(state)),
    random.SystemRandom: (lambda each: None, lambda each, state: None),
    random.Random: (lambda each: each.getstate(), lambda each, state: each.setstate(state)),
}
"""How to read and set the state of objects whose state is a plain value. The first kind that fits counts."""

KINDS = (torch.Tensor, nn.Module, Optimizer, *STATES)
"""The kinds of objects whose new state is sent back."""

MOST = 1000
"""Of a container with more items, only this many are compared. A tensor with more elements is sent only if it may have changed."""

LARGEST = 1 << 20
"""Of an array with more bytes, only some values are compared: it may be a view of a large file."""

MOST_NAMED = 5
SENT = ("training", "defaults", "state", "param_groups")
"""Attributes of models and optimizers that are sent back, beside the parts of a model."""

CALLERS = "parwrap"
"""Marks the number of one of the caller's objects in packed data."""


class CallersObjects:
    """The caller's objects of ``KINDS``, and their parts, with the same numbers in the caller and on rank 0.

    Args:
        found: the objects, in the same order on both sides.

    >>> model = nn.Linear(1, 1)
    >>> callers = CallersObjects([model])
    >>> before = callers.now()
    >>> _ = nn.init.ones_(model.weight)
    >>> len(callers.state(before)["tensors"])
    2
    """

    def __init__(self, found: Iterable[Any] = ()) -> None:
        self._objects = list({id(each): each for thing in found for each in _with_parts(thing)}.values())
        self._numbers = {id(each): number for number, each in enumerate(self._objects)}
        parts = [each for thing in self._objects if isinstance(thing, (nn.Module, Optimizer)) for each in _tensors_of(thing)]
        self._trained = {self._numbers[id(each)] for each in parts}

    def __contains__(self, thing: object) -> bool:
        return id(thing) in self._numbers

    def pack(self, thing: Any, file: Path | BinaryIO) -> None:
        """Write ``thing`` into a file, with numbers in place of the caller's objects."""
        numbers = self._numbers

        class Pickler(pickle.Pickler):
            def __init_subclass__(cls) -> None:
                """Extend the ``persistent_id`` that torch defines for the storages of tensors."""
                of_storage = cls.persistent_id

                def persistent_id(self: Any, each: Any) -> Any:
                    number = numbers.get(id(each))
                    return of_storage(self, each) if number is None else (CALLERS, number)

                cls.persistent_id = persistent_id  # type: ignore[method-assign]

        # torch's own choice, protocol 2, turns a TimeoutError into an OSError
        torch.save(thing, file, pickle_module=pickle_module(Pickler=Pickler), pickle_protocol=pickle.HIGHEST_PROTOCOL)

    def unpack(self, path: Path) -> Any:
        """Read what :meth:`pack` wrote on the other side."""
        objects = self._objects

        class Unpickler(pickle.Unpickler):
            def __setattr__(self, name: str, value: Any) -> None:
                """Extend the ``persistent_load`` that torch sets for the storages of tensors."""
                super().__setattr__(name, partial(_loaded, objects, value) if name == "persistent_load" else value)

        # a caller that has not started CUDA can still fork
        where = None if cuda_has_started() else "cpu"
        return torch.load(path, weights_only=False, map_location=where, pickle_module=pickle_module(Unpickler=Unpickler))

    def now(self) -> list[Any]:
        """A snapshot of the state of each tensor, to find out later which have changed."""
        # the tensors are kept, because otherwise another tensor could get their address
        return [(_state_of(each), each.detach()) if _is_tensor(each) else (None, None) for each in self._objects]

    def state(self, before: list[Any]) -> dict[str, list[Any]]:
        """The new state for :meth:`take`. It leaves out large tensors that no model or optimizer holds, if they are as ``before``."""
        every = list(enumerate(self._objects))
        tensors = [(number, each) for number, each in every if _is_tensor(each)]
        changed = [pair for pair in tensors if pair[0] in self._trained or _may_have_changed(pair[1], before[pair[0]][0])]
        return {
            "tensors": [(number, _values(each), each.requires_grad) for number, each in changed],
            "modules": [(number, _parts_of(each)) for number, each in every if isinstance(each, nn.Module)],
            "optimizers": [(number, each.__getstate__()) for number, each in every if isinstance(each, Optimizer)],
            "others": [(number, _other_state(each)) for number, each in every if isinstance(each, tuple(STATES))],
        }

    def take(self, state: Mapping[str, list[Any]]) -> None:
        """Give the caller's objects the state of rank 0, in place."""
        for number, values, asks in state["tensors"]:
            _set(self._objects[number], values, asks)
        for number, parts in state["modules"]:
            attributes = vars(self._objects[number])
            attributes.update(_updated(attributes, parts))
        for number, attributes in state["optimizers"]:
            optimizer = self._objects[number]
            optimizer.__setstate__(_updated(vars(optimizer), attributes))
        for number, other in state["others"]:
            _access(self._objects[number])[1](self._objects[number], other)


def pickle_module(**classes: type) -> ModuleType:
    """A pickle module for :func:`torch.save` and :func:`torch.load`, with ``classes`` instead of pickle's own."""
    module = ModuleType("pickle")
    vars(module).update(vars(pickle))
    vars(module).update(classes)
    return module


def _access(thing: Any) -> tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]:
    return next(access for kind, access in STATES.items() if isinstance(thing, kind))


def _other_state(thing: Any) -> Any:
    return _access(thing)[0](thing)


def _with_parts(thing: Any) -> list[Any]:
    """``thing`` and its parts: modules, parameters and buffers, or the optimizer of a scheduler."""
    if isinstance(thing, LRScheduler):
        return [thing, *_with_parts(thing.optimizer)]
    if isinstance(thing, nn.Module):
        return [*thing.modules(), *_tensors_of(thing)]
    return [thing, *_tensors_of(thing)] if isinstance(thing, Optimizer) else [thing]


def _tensors_of(thing: nn.Module | Optimizer) -> list[torch.Tensor]:
    if isinstance(thing, nn.Module):
        return [*thing.parameters(), *thing.buffers()]
    return [parameter for group in thing.param_groups for parameter in group["params"]]


def _parts_of(module: nn.Module) -> dict[str, Any]:
    """What ``module`` consists of, without attributes that the user has added."""
    attributes = vars(module)
    return {name: attributes[name] for name in (*CONTENTS, "training") if name in attributes}


def _is_tensor(thing: Any) -> bool:
    """Whether ``thing`` is a tensor with elements, which a lazy parameter has not yet."""
    return isinstance(thing, torch.Tensor) and not is_lazy(thing)


def _state_of(tensor: torch.Tensor) -> Any:
    """Values that differ once a tensor has been changed in place or moved; ``None`` if torch does not record changes of it."""
    if tensor.is_inference() or tensor.layout != torch.strided:
        return None
    return version_of(tensor), tensor.data_ptr(), tensor.shape, tensor.dtype


def _may_have_changed(tensor: torch.Tensor, before: Any) -> bool:
    """Whether to send a tensor that no model or optimizer holds. Small ones always are: ``x.numpy()[0] = 1`` changes no version."""
    return tensor.numel() <= MOST or before is None or _state_of(tensor) != before


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the elements of ``tensor``, which is sent without the rest of its storage."""
    values = tensor.detach()
    return values if tensor.layout != torch.strided or values.untyped_storage().nbytes() == values.nbytes else values.clone()


def _set(tensor: torch.Tensor, values: torch.Tensor, asks: bool) -> None:
    """Give ``tensor`` these ``values``, in its own memory if they fit there; ``asks`` says whether it requires a gradient."""
    if is_lazy(tensor):
        tensor.materialize(values.shape, dtype=values.dtype)
    with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
        repeats = tensor.layout == torch.strided and 0 in tensor.stride()
        if (tensor.shape, tensor.dtype) == (values.shape, values.dtype) and not repeats:
            tensor.copy_(values)
        else:
            tensor.data = values
    if tensor.is_leaf and not tensor.is_inference():
        tensor.requires_grad_(asks)


def _updated(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes ``new``, in which the ``old`` containers get the new content, because other objects may refer to them."""
    return {name: _in_place(old.get(name), value) for name, value in new.items()}


def _in_place(old: Any, new: Any) -> Any:
    """``new``; if both are dicts or lists, ``old`` with the content of ``new``."""
    if isinstance(old, dict) and isinstance(new, dict):
        entries = _updated(old, new)
        old.clear()
        old.update(entries)
        return old
    if isinstance(old, list) and isinstance(new, list):
        old[:] = [_in_place(*pair) for pair in zip(old, new, strict=False)] + new[len(old) :]
        return old
    return new


def _loaded(objects: list[Any], of_storage: Callable[[Any], Any], saved: Any) -> Any:
    """The object of a persistent id: the caller's, or a storage of torch's."""
    return objects[saved[1]] if saved[0] == CALLERS else of_storage(saved)


def contents(names: Mapping[str, Any], sent_back: Container[Any] = ()) -> dict[str, Any]:
    """The values behind ``names`` and behind the attributes of the script's objects, in a form to compare with :func:`differing`.

    Args:
        names: the values by their names.
        sent_back: the tensors, models and optimizers whose state is sent back, so that it is not compared.

    >>> history = [0.5]
    >>> before = contents({"history": history})
    >>> history.append(0.25)
    >>> differing(before, contents({"history": history}))
    ['history']
    """
    found: dict[str, Any] = {}
    for name, value in names.items():
        attributes = _attributes(value)
        found |= {name: _Itself(value)} if attributes else _contents_of(name, value, sent_back)
        for attribute, each in attributes.items():
            found |= _contents_of(f"{name}.{attribute}", each, sent_back)
    return found


def _attributes(value: Any) -> Mapping[str, Any]:
    """The attributes of an object of the script."""
    is_other = isinstance(value, (type, FunctionType, ModuleType, *KINDS))
    return {} if is_other or not is_of_script(type(value)) else attributes_of(value)


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes of an object, in its ``__dict__`` and in its ``__slots__``.

    >>> class Meter:
    ...     __slots__ = ("total", "count")
    >>> meter = Meter()
    >>> meter.total = 3
    >>> attributes_of(meter)
    {'total': 3}
    """
    kinds = [kind for kind in type(value).__mro__ if "__slots__" in vars(kind)]
    slots = [name for kind in kinds for name, member in vars(kind).items() if isinstance(member, MemberDescriptorType)]
    return {**{name: getattr(value, name) for name in slots if hasattr(value, name)}, **getattr(value, "__dict__", {})}


def _contents_of(name: str, value: Any, sent_back: Container[Any]) -> dict[str, Any]:
    """The value behind ``name``; for a model or optimizer also the attributes that the script has set, which are not sent back."""
    own = {}
    if isinstance(value, (nn.Module, Optimizer)):
        own = {each: there for each, there in vars(value).items() if not (each in SENT or each.startswith("_") or callable(there))}
    return {name: _content(value, sent_back), **{f"{name}.{attribute}": _content(each, sent_back) for attribute, each in own.items()}}


def differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The names whose values have changed, or are new."""
    return [name for name, value in after.items() if name not in before or before[name] != value]


class _Itself:
    """Wraps a value, and equals only a wrapper of the same object. The value is kept, so that no other object gets its id."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self._value is other._value


def _content(value: Any, sent_back: Container[Any], depth: int = 3) -> Any:
    """``value`` in a form that is equal later if the value has not changed; ``depth`` levels of containers are looked into."""
    if isinstance(value, (int, float, complex, str, bytes, type(None))):
        return type(value), repr(value)
    if isinstance(value, (list, tuple, set, frozenset, dict, deque)) and depth:
        inner = depth - 1 if len(value) <= MOST else min(depth - 1, 1)
        return _Itself(value), len(value), [_content(each, sent_back, inner) for each in _items(value)]
    if isinstance(value, np.ndarray) and value.dtype == object and depth:
        return _Itself(value), [_content(each, sent_back, depth - 1) for each in value.flat[:: _step(value.size)]]
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return _Itself(value), crc32(value.flat[:: 1 if value.nbytes <= LARGEST else _step(value.size)].tobytes())
    if isinstance(value, (bytearray, array)):
        return _Itself(value), crc32(value)
    if isinstance(value, (torch.Tensor, nn.Module, Optimizer)) and value not in sent_back:
        return _Itself(value), [_state_of(each) for each in _with_parts(value) if _is_tensor(each)]
    if isinstance(value, tuple(STATES)) and value not in sent_back:
        return _Itself(value), repr(_other_state(value))
    if depth and (attributes := _attributes(value)) and len(attributes) <= MOST:
        return _Itself(value), [_content(each, sent_back, depth - 1) for each in attributes.values()]
    return _Itself(value)


def _items(container: Any) -> Iterator[Any]:
    """The items of ``container``, for a dict its keys and values; if there are more than ``MOST``, some at equal distances."""
    step = _step(len(container))
    if isinstance(container, dict):
        return chain.from_iterable(islice(container.items(), 0, None, step))
    return islice(container, 0, None, step)


def _step(count: int) -> int:
    """The step that picks at most ``MOST`` of ``count`` items, at equal distances."""
    return -(-count // MOST) or 1


def is_of_script(kind: type) -> bool:
    """Whether ``kind`` is a class of the script, not of a library."""
    file = kind.__module__ != "__main__" and getattr(sys.modules.get(kind.__module__), "__file__", None)
    return kind.__module__ == "__main__" or bool(file and not (is_installed(file) or is_standard(file) or is_ours(file)))


def warn_of_changes(names: list[str]) -> None:
    """Warn of values that the function has changed on rank 0, but that are unchanged in this process."""
    if not names:
        return
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    place = script_place()
    warnings.warn_explicit(
        f"parwrap: the function changed {', '.join(names[:MOST_NAMED])}{more} on its ranks, and this process keeps its own. Only tensors, "
        "models, optimizers, schedulers, gradient scalers and random generators are copied back: those among its arguments "
        "and the variables that it uses, and one level deep in these, as trainer.model. Return whatever else you need.",
        UserWarning,
        place.file,
        place.line,
    )
