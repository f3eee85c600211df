"""Packs what a launched rank sends back: the function's result, and the new state of the caller's objects.

The rank has the caller's objects: all of them if it was forked, otherwise those that were sent (``spawning.py``). Both sides number them,
and what is sent back refers to these numbers. So a model that was passed in is the same object when it is returned. ``remote_exception.py``
handles exceptions, ``launching.py`` the transfer.
"""

from __future__ import annotations

import gc
import io
import pickle
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import FunctionType, ModuleType
from typing import Any, BinaryIO

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from parwrap.coordination.call_site import location
from parwrap.inline.object_graph import is_users_module
from parwrap.inline.python_changes import INTERNAL, Change, Snapshot, entry_name, make_change, part_entries, without_entries
from parwrap.loop.loop_state import group_options, parameters_of
from parwrap.system.remote_exception import in_one_line
from parwrap.torch_private.modules import BUFFERS, MODULES, PARAMETERS
from parwrap.torch_private.tensors import version_of

__all__ = ["SyncedObjects", "is_tracked", "pickle_module"]

KINDS = (torch.Tensor, nn.Module, Optimizer, LRScheduler)
PARTS = (PARAMETERS, BUFFERS, MODULES, "training")
MOST_NAMED = 5
OWN = "which was not sent to the ranks, because it is in a module that they import"
CALLERS = "parwrap"
"""Marks the number of a caller's object in packed data."""


class SyncedObjects:
    """The tensors, models, optimizers and schedulers of the caller, the other objects that a function reaches, and their numbers.

    Args:
        things: tensors, models and so on, in the same order on both sides; by default all of those in this process, for ranks that are
            forked then.
        reached: the other objects, with their names, also in the same order.
        pickler: the pickler in the rank.
        own: in a spawned rank, further objects that the function reaches there, which the caller has not sent.

    >>> model, file = nn.Linear(1, 1), io.BytesIO()
    >>> callers = SyncedObjects()
    >>> callers.pack({"trained": model}, file)
    >>> _ = file.seek(0)
    >>> callers.unpack(file)["trained"] is model
    True
    """

    def __init__(
        self,
        things: Iterable[Any] | None = None,
        reached: Iterable[tuple[str, Any]] = (),
        pickler: type[pickle.Pickler] = pickle.Pickler,
        own: Iterable[tuple[str, Any]] | None = None,
    ) -> None:
        if things is None:
            everything = gc.get_objects()
            kinds = {kind for kind in set(map(type, everything)) if issubclass(kind, (*KINDS, type, FunctionType))}
            things = (thing for thing in everything if type(thing) in kinds and (is_tracked(thing) or _is_local(thing)))
        self._known = dict(enumerate(things))
        self._keys = {id(thing): key for key, thing in self._known.items()}
        found = dict(enumerate(reached, len(self._known)))
        self._names = {key: name for key, (name, _) in found.items()}
        self._reached = {key: thing for key, (_, thing) in found.items()}
        self._keys = {id(thing): key for key, thing in self._reached.items()} | self._keys
        self._is_spawned = own is not None
        self._own = dict(
            enumerate(((name, thing) for name, thing in own or () if id(thing) not in self._keys), len(self._known) + len(found))
        )
        self._pickler = pickler
        self._tensors: dict[int, tuple | None] = {}
        self._asks: dict[int, bool] = {}
        self._contents: dict[int, int] = {}
        self._modules: dict[int, tuple] = {}
        self._options: dict[int, str] = {}
        self._objects = Snapshot({})

    def watch(self) -> None:
        """Remember the present state of the objects for :meth:`changes`: before the fork, or after the objects were received."""
        self._tensors = {key: _state_of(thing) for key, thing in self._of(torch.Tensor)}
        # otherwise other memory could get their address; not tensors, which the next of these objects would find
        self._held = [self._known[key].untyped_storage() for key, state in self._tensors.items() if state]
        owned = [each for _, module in self._of(nn.Module) for name in PARTS[:2] for each in vars(module).get(name, {}).values()]
        self._asks = {key: asks for key in self._tensors if (asks := _asks(self._known[key])) is not None}
        self._contents = {key: _checksum(self._known[key]) for key in self._keys_of(owned) if self._tensors.get(key)}
        self._modules = {key: _parts_of(thing) for key, thing in self._of(nn.Module)}
        self._options = {key: repr(group_options(thing)) for key, thing in self._of(Optimizer)}
        self._objects = Snapshot(self._reached | {key: thing for key, (_, thing) in self._own.items()})

    def pack(self, thing: Any, file: BinaryIO) -> None:
        """Write ``thing`` into ``file``, with references to the caller's objects in their place."""
        keys = self._keys

        class Pickler(self._pickler):  # type: ignore[name-defined]
            def __init_subclass__(cls) -> None:
                """The persistent id of a storage, as torch writes it."""
                of_storage = cls.persistent_id

                def persistent_id(self: Any, each: Any) -> Any:
                    key = keys.get(id(each))
                    if key is None or (issubclass(type(each), torch.Tensor) and _is_unwatched(each)):
                        return of_storage(self, each)
                    return CALLERS, key

                cls.persistent_id = persistent_id

        # protocol 2, torch's own choice, has a TimeoutError come back as an OSError
        torch.save(thing, file, pickle_module=pickle_module(Pickler=Pickler), pickle_protocol=pickle.HIGHEST_PROTOCOL)

    def unpack(self, file: BinaryIO) -> Any:
        """Unpack what :meth:`pack` packed on the other side."""
        known = self._reached | self._known

        class Unpickler(pickle.Unpickler):
            def __setattr__(self, name: str, value: Any) -> None:
                """Torch's, for the storages of tensors."""
                if name == "persistent_load":
                    value = partial(_loaded, known, value)
                super().__setattr__(name, value)

        # a caller that has not initialized CUDA can still fork
        where = None if torch.cuda.is_initialized() else "cpu"
        return torch.load(file, weights_only=False, map_location=where, pickle_module=pickle_module(Unpickler=Unpickler))

    def can_pack(self, thing: Any) -> bool:
        """Whether ``thing`` can be sent."""
        return not self._why_not(thing)

    def _why_not(self, thing: Any) -> str:
        """Why ``thing`` cannot be sent; empty if it can."""
        with io.BytesIO() as file:
            try:
                self.pack(thing, file)
                file.seek(0)
                self.unpack(file)
            except Exception as error:
                return in_one_line(error)
            return ""

    def changes(self, returned: Any = None) -> dict[str, list]:
        """The new state of the caller's objects in this process, for :meth:`take`: everything for those in ``returned``."""
        reached = self._keys_in(returned)
        changed = {key for key, tensor in self._of(torch.Tensor) if key in reached or _state_of(tensor) != self._tensors[key]}
        # running statistics change without a version, and so do changes through ``p.data``
        changed |= {key for key, before in self._contents.items() if key not in changed and _checksum(self._known[key]) != before}
        changed -= {key for key in changed if _is_in_parts(self._known[key])}
        stepped = {key for key, each in self._of(Optimizer) if key in reached or changed & self._keys_of(parameters_of(each))}
        stepped |= {key for key, before in self._options.items() if repr(group_options(self._known[key])) != before}
        storages, moved = self._where(changed)
        ties = self._ties(moved)
        tied = {key for key, *_ in ties if self._tensors[key]}
        objects, lost = self._objects_changed()
        return {
            "storages": [(key, _storage(self._known[key])) for key in storages],
            "tensors": [(key, _values(self._known[key])) for key in moved if key not in tied],
            "ties": ties,
            "asks": [(key, not before) for key, before in self._asks.items() if _asks(self._known[key]) is (not before)],
            "modules": [(key, parts) for key, _ in self._of(nn.Module) if (parts := self._changed_in(key))],
            "optimizers": [(key, each.__getstate__()) for key, each in self._of(Optimizer) if key in stepped],
            "schedulers": [
                (key, each.state_dict()) for key, each in self._of(LRScheduler) if stepped & self._keys_of([vars(each).get("optimizer")])
            ],
            "objects": objects,
            "lost": lost,
        }

    def _objects_changed(self) -> tuple[list[Change], list[str]]:
        """The changes of the other objects, and the names of changes that cannot be sent."""
        changes, unknown = self._objects.changes()
        lost = [self._named(key, part, None, "") for key, part in unknown]
        own = [each for each in changes if self._is_own(*each[:2])]
        lost += [self._named(key, part, entry, OWN) for key, part, change in own for entry in part_entries(part, change)]
        changes = [each for each in changes if not self._is_own(*each[:2])]
        sent = []
        if self.can_pack([each for each in changes if each[1] != "value"]):
            sent = changes
        for key, part, change in [] if sent else changes:
            failing = {entry: why for entry, each in part_entries(part, change).items() if (why := self._why_not(each))}
            lost += [self._named(key, part, entry, why) for entry, why in failing.items()]
            if failing and part == "attributes" and not is_users_module(type(self._reached[key]).__module__):
                if not self._names[key].startswith(INTERNAL):
                    lost.append(self._names[key])
                continue  # the values would be inconsistent if only a part of them were sent
            if (rest := without_entries(part, change, failing)) is not None:
                sent.append((key, part, rest))
        return sent, [name for name in dict.fromkeys(lost) if name]

    def _is_own(self, key: int, part: str) -> bool:
        """Whether a part of an object exists on this rank by import, and is not the caller's."""
        if key in self._own or not self._is_spawned:
            return key in self._own
        thing = self._reached[key]
        if part == "globals":
            return thing.__globals__.get("__name__") != "__main__"
        imported = issubclass(type(thing), ModuleType) or (
            issubclass(type(thing), (type, FunctionType)) and thing.__module__ != "__main__" and not _is_local(thing)
        )
        return imported and part == "attributes"

    def _named(self, key: int, part: str, entry: Any, why: str) -> str:
        """Says what has changed and why it cannot be sent; empty for private state of a library."""
        name, thing = self._own[key] if key in self._own else (self._names[key], self._reached[key])
        called = entry_name(thing, name, part, entry)
        return f"{called} ({why})" if called and why else called or ""

    def _keys_in(self, returned: Any) -> set[int]:
        """The numbers of the caller's objects in ``returned``, including those inside its models."""
        keys, found = self._keys, set()
        others = getattr(self._pickler, "reducer_override", lambda pickler, thing: NotImplemented)

        class Finder(self._pickler):  # type: ignore[name-defined]
            def reducer_override(self, each: Any) -> Any:
                known = id(each) in keys and (is_tracked(each) or _is_local(each))
                if known:
                    found.add(keys[id(each)])
                return (int, ()) if known or issubclass(type(each), torch.Tensor) else others(self, each)

        with suppress(Exception):  # pack reports that error
            Finder(io.BytesIO()).dump(returned)
        models = [self._known[key] for key in found if issubclass(type(self._known[key]), nn.Module)]
        found |= self._keys_of(each for model in models for each in (*model.modules(), *model.parameters(), *model.buffers()))
        return {key for key in found if not (issubclass(type(self._known[key]), torch.Tensor) and _is_unwatched(self._known[key]))}

    def _changed_in(self, key: int) -> dict[str, Any]:
        """The changes of a module, without the attributes that a user gives it."""
        attributes = vars(self._known[key])
        if any(map(_is_in_parts, attributes.get(PARAMETERS, {}).values())) or _parts_of(self._known[key]) == self._modules[key]:
            return {}
        return {name: attributes[name] for name in PARTS if name in attributes}

    def _where(self, changed: set[int]) -> tuple[list[int], list[int]]:
        """The values of ``changed``: one tensor for each changed storage of the caller, and the values that are elsewhere.

        A view of a moved tensor keeps the old values, so the moved tensor is sent.
        """
        storages: dict[int, int] = {}
        moved = []
        for key in changed:
            tensor, before = self._known[key], self._tensors[key]
            now = _state_of(tensor)
            if before is None or now is None or before[1:] != now[1:]:
                moved.append(key)
            else:
                storages.setdefault(tensor.untyped_storage().data_ptr(), key)
        return list(storages.values()), moved

    def _ties(self, moved: list[int]) -> list[tuple]:
        """Which of the ``moved`` tensors share memory with another one, for example after ``b.data = a.data``, and their layout there."""
        if not moved:
            return []
        unmoved = [key for key in self._tensors.keys() - set(moved) if self._tensors[key]]
        homes = {self._known[key].untyped_storage().data_ptr(): key for key in unmoved}
        firsts: dict[tuple, int] = {}
        ties: list[tuple] = []
        for key in moved:
            tensor = self._known[key]
            state = _state_of(tensor)
            if state is None or not tensor.numel():
                continue
            if (home := homes.get(tensor.untyped_storage().data_ptr())) is not None:
                ties.append((key, home, (tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())))
            elif (first := firsts.setdefault(state[1:], key)) != key:
                ties.append((key, first, None))
        return ties

    @torch.no_grad()
    def take(self, changes: dict[str, list]) -> None:
        """Apply the changes in the caller, in place, so that every object keeps its identity."""
        for key, values in changes["storages"]:
            _storage(self._known[key]).copy_(values)
        for key, values in changes["tensors"]:
            tensor = self._known[key]
            if is_lazy(tensor):
                tensor.materialize(values.shape, dtype=values.dtype)
            if (tensor.shape, tensor.dtype) == (values.shape, values.dtype) and not _repeats(tensor):
                tensor.copy_(values)
            else:
                tensor.data = values
        for key, other, lies in changes["ties"]:
            there = self._known[other].data
            if lies is not None:
                dtype, *lies = lies
                there = torch.empty(0, dtype=dtype, device=there.device).set_(there.untyped_storage(), *lies)
            self._known[key].data = there
        for key, asks in changes["asks"]:
            self._known[key].requires_grad_(asks)
        for key, parts in changes["modules"]:
            attributes = vars(self._known[key])
            attributes.update({name: _in_place(attributes.get(name), part) for name, part in parts.items()})
        for key, state in changes["optimizers"]:
            attributes = vars(self._known[key])
            self._known[key].__setstate__({name: _in_place(attributes.get(name), part) for name, part in state.items()})
        for key, state in changes["schedulers"]:
            self._known[key].load_state_dict(state)
        for key, part, change in changes["objects"]:
            make_change(self._reached[key], part, change)
        self._warn_of_lost(changes["lost"])

    def _warn_of_lost(self, named: list[str]) -> None:
        """Warn once of objects that stay unchanged here, although the function has changed them."""
        if not named:
            return
        file, _, line = location().rpartition(":")
        more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
        warnings.warn_explicit(
            f"parwrap: the function changed {', '.join(named[:MOST_NAMED])}{more} on its ranks, but the change cannot be sent to this "
            "process, where it stays unchanged. Create it inside the function, or return what you need of it.",
            UserWarning,
            file,
            int(line),
        )

    def _keys_of(self, things: Iterable[Any]) -> set[int]:
        return {self._keys[id(thing)] for thing in things if id(thing) in self._keys}

    def _of(self, kind: type) -> Iterator[tuple[int, Any]]:
        return ((key, thing) for key, thing in self._known.items() if issubclass(type(thing), kind))


def pickle_module(**classes: type) -> ModuleType:
    """A pickle module for :func:`torch.save` and :func:`torch.load`, with ``classes`` instead of pickle's own."""
    module = ModuleType("pickle")
    vars(module).update(vars(pickle))
    vars(module).update(classes)
    return module


def _in_place(old: Any, new: Any) -> Any:
    """``new``; if both are dicts or lists, ``old`` with the content of ``new``, because other objects may refer to ``old``."""
    if isinstance(old, dict) and isinstance(new, dict):
        contents = {name: _in_place(old.get(name), value) for name, value in new.items()}
        old.clear()
        old.update(contents)
        return old
    if isinstance(old, list) and isinstance(new, list):
        old[:] = [_in_place(*pair) for pair in zip(old, new, strict=False)] + new[len(old) :]
        return old
    return new


def is_tracked(thing: Any) -> bool:
    """Whether a rank's changes to ``thing`` are copied to the caller."""
    return issubclass(type(thing), KINDS)


def _is_local(thing: Any) -> bool:
    """Whether ``thing`` is a class or function that cannot be found by its name."""
    return issubclass(type(thing), (type, FunctionType)) and "<" in thing.__qualname__


def _is_unwatched(tensor: torch.Tensor) -> bool:
    """Whether changes of ``thing`` cannot be detected, so that it is sent as a copy."""
    return not is_lazy(tensor) and (tensor.is_inference() or tensor.layout != torch.strided)


def _is_in_parts(tensor: torch.Tensor | None) -> bool:
    """Whether every rank has only a part of it, because it was sharded when the function failed."""
    return hasattr(type(tensor), "full_tensor")


def _state_of(tensor: torch.Tensor) -> tuple | None:
    """A value that shows whether a tensor was changed in place, or moved; ``None`` for an untracked one."""
    if is_lazy(tensor) or _is_unwatched(tensor) or tensor.device.type not in ("cpu", "cuda"):
        return None
    try:
        tensor.untyped_storage().data_ptr()
        return version_of(tensor), tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
    except RuntimeError:  # it has no memory, like a tensor that wraps others
        return None


def _loaded(known: dict[int, Any], of_storage: Callable[[Any], Any], saved: Any) -> Any:
    """The object of a persistent id: an object of the caller, or a storage of torch's."""
    return known[saved[1]] if saved[0] == CALLERS else of_storage(saved)


def _asks(tensor: torch.Tensor) -> bool | None:
    """Whether ``tensor`` requires a gradient, if this can be set."""
    return tensor.requires_grad if tensor.is_leaf and (is_lazy(tensor) or not tensor.is_inference()) else None


def _checksum(tensor: torch.Tensor) -> int:
    """The address of its elements; 0 for a subclass without memory."""
    try:
        return zlib.crc32(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    except (RuntimeError, TypeError):
        return 0


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the elements of ``tensor``, which is sent without the rest of its storage."""
    values = tensor.detach()
    return values if values.untyped_storage().nbytes() == values.nbytes else values.clone()


def _storage(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of ``tensor``."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, (storage.nbytes() // tensor.itemsize,), (1,))


def _repeats(tensor: torch.Tensor) -> bool:
    """Whether several elements of ``tensor`` share memory, so that nothing can be copied into it."""
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _parts_of(module: nn.Module) -> tuple:
    """The parameters and buffers of ``module``, by name. A module that is still being built may have none."""
    parts = [vars(module).get(name) for name in PARTS]
    return tuple([(name, id(part)) for name, part in each.items()] if isinstance(each, dict) else each for each in parts)
