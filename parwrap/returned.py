"""What comes back from a rank that was forked: what it returns or raises, and what it has made of the caller's tensors.

A forked rank has every object of the caller, at the same address. So both sides know the caller's objects by their ``id``, and what is
sent back refers to them: a model that was passed in is the same object when it is returned. How it is sent is ``forked.py``'s.
"""

from __future__ import annotations

import gc
import io
import pickle
import traceback
import zlib
from collections.abc import Iterator
from types import FunctionType, ModuleType, TracebackType
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

__all__ = ["CallersObjects", "Raised", "RemoteTraceback"]

KINDS = (torch.Tensor, nn.Module, Optimizer, LRScheduler)
MEMBERS = ("errno", "strerror", "filename", "filename2", "name", "path")
PARTS = ("_parameters", "_buffers", "_modules", "training")


class RemoteTraceback(Exception):
    """The traceback of an exception that was raised on another rank: the cause of the same in the caller."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Raised(NamedTuple):
    """An exception, in parts that can be sent whatever its ``__init__`` takes.

    Attributes:
        kind: its class, or the nearest base of it that the caller has.
        args, attributes: its own, or what they look like.
        members: of built-in exceptions, which are neither.
        text: the traceback.
    """

    kind: type[BaseException]
    args: tuple
    attributes: dict[str, Any]
    members: dict[str, Any]
    text: str

    def error(self, who: str) -> BaseException:
        """The exception, raised by ``who``."""
        try:
            error = self.kind(*self.args)
        except Exception:
            error = self.kind.__new__(self.kind, *self.args)
        error.args = self.args
        vars(error).update(self.attributes)
        for name, value in self.members.items():
            setattr(error, name, value)
        error.__cause__ = RemoteTraceback(f"{who} failed:\n{self.text}")
        return error


class CallersObjects:
    """The tensors, models, optimizers and schedulers of this process, and what both sides of a fork know them by.

    Made before the fork; the side that is forked packs, the caller's unpacks.

    >>> model, file = nn.Linear(1, 1), io.BytesIO()
    >>> callers = CallersObjects()
    >>> callers.pack({"trained": model}, file)
    >>> _ = file.seek(0)
    >>> callers.unpack(file)["trained"] is model
    True
    """

    def __init__(self) -> None:
        self._known = {id(thing): thing for thing in gc.get_objects() if issubclass(type(thing), KINDS) or _is_local(thing)}
        self._tensors = {key: _state_of(thing) for key, thing in self._of(torch.Tensor)}
        self._held = [
            thing.detach() for _, thing in self._of(torch.Tensor) if not is_lazy(thing)
        ]  # or other memory could come to lie where theirs was
        owned = {id(each) for _, module in self._of(nn.Module) for name in PARTS[:2] for each in vars(module).get(name, {}).values()}
        self._contents = {key: _checksum(self._known[key]) for key in owned & self._tensors.keys() if self._tensors[key]}
        self._modules = {key: _parts_of(thing) for key, thing in self._of(nn.Module)}

    def pack(self, thing: Any, file: BinaryIO) -> None:
        """Write ``thing`` into ``file``, with references to the caller's objects in their place."""
        known = self._known

        class Pickler(pickle.Pickler):
            def reducer_override(self, each: Any) -> Any:
                return (_callers, (id(each),)) if known.get(id(each)) is each else NotImplemented

        torch.save(thing, file, pickle_module=_pickle_module(Pickler=Pickler))

    def unpack(self, file: BinaryIO) -> Any:
        """What :meth:`pack` was given on the other side."""
        known = self._known

        class Unpickler(pickle.Unpickler):
            def find_class(self, module: str, name: str) -> Any:
                return known.get if (module, name) == (__name__, "_callers") else super().find_class(module, name)

        return torch.load(file, weights_only=False, pickle_module=_pickle_module(Unpickler=Unpickler))

    def raised(self, error: BaseException, outermost: TracebackType | None) -> Raised:
        """``error`` in parts that can be packed; its traceback is shown from ``outermost`` on."""
        kind = next(each for each in type(error).__mro__ if self._can_pack(each))
        args = tuple(each if self._can_pack(each) else repr(each) for each in error.args)
        attributes = {name: each if self._can_pack(each) else repr(each) for name, each in vars(error).items()}
        names = MEMBERS if isinstance(error, (OSError, ImportError)) else ()
        members = {name: value for name in names if (value := getattr(error, name, None)) is not None and self._can_pack(value)}
        return Raised(kind, args, attributes, members, "".join(traceback.format_exception(type(error), error, outermost)).rstrip())

    def _can_pack(self, thing: Any) -> bool:
        with io.BytesIO() as file:
            try:
                self.pack(thing, file)
                file.seek(0)
                self.unpack(file)
            except Exception:
                return False
            return True

    def changes(self) -> dict[str, list]:
        """What has become of the caller's objects in this process, to be sent to :meth:`take`."""
        changed = {key for key, tensor in self._of(torch.Tensor) if _state_of(tensor) != self._tensors[key]}
        # running statistics are changed without a trace, and so is what is changed through ``p.data``
        changed |= {key for key, before in self._contents.items() if key not in changed and _checksum(self._known[key]) != before}
        stepped = {key for key, each in self._of(Optimizer) if changed.intersection(map(id, _parameters_of(each)))}
        storages, moved = self._where(changed)
        return {
            "storages": [(key, _storage(self._known[key])) for key in storages],
            "tensors": [(key, _values(self._known[key])) for key in moved],
            "modules": [
                (key, {name: vars(module)[name] for name in PARTS if name in vars(module)})
                for key, module in self._of(nn.Module)
                if _parts_of(module) != self._modules[key]
            ],
            "optimizers": [(key, each.__getstate__()) for key, each in self._of(Optimizer) if key in stepped],
            "schedulers": [(key, each.state_dict()) for key, each in self._of(LRScheduler) if id(vars(each).get("optimizer")) in stepped],
        }

    def _where(self, changed: set[int]) -> tuple[list[int], list[int]]:
        """Where the values of ``changed`` are: a tensor in each of the caller's storages that they are in, and those that are elsewhere.

        A view of what was moved stays behind with the values of before, so what was moved counts.
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

    @torch.no_grad()
    def take(self, changes: dict[str, list]) -> None:
        """Make the same of them in the caller: in place, so that every object stays what it is."""
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
        for key, parts in changes["modules"]:
            vars(self._known[key]).update(parts)
        for key, state in changes["optimizers"]:
            self._known[key].__setstate__(state)
        for key, state in changes["schedulers"]:
            self._known[key].load_state_dict(state)

    def _of(self, kind: type) -> Iterator[tuple[int, Any]]:
        return ((key, thing) for key, thing in self._known.items() if issubclass(type(thing), kind))


def _callers(key: int) -> Any:
    """Stands for the caller's object whose ``id`` is ``key``."""
    raise NotImplementedError


def _pickle_module(**classes: type) -> ModuleType:
    module = ModuleType("pickle")
    vars(module).update(vars(pickle))
    vars(module).update(classes)
    return module


def _is_local(thing: Any) -> bool:
    """Whether it is a class or a function that cannot be found by its name."""
    return issubclass(type(thing), (type, FunctionType)) and "<" in thing.__qualname__


def _state_of(tensor: torch.Tensor) -> tuple | None:
    """What tells that a tensor was changed in place, or put elsewhere; ``None`` for one that is not looked after."""
    if is_lazy(tensor) or tensor.is_inference() or tensor.layout != torch.strided or tensor.device.type != "cpu":
        return None
    try:
        return tensor._version, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
    except RuntimeError:  # has no memory
        return None


def _checksum(tensor: torch.Tensor) -> int:
    """Of its elements; 0 for a subclass that has none of its own."""
    try:
        return zlib.crc32(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data)
    except (RuntimeError, TypeError):
        return 0


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that has those of ``tensor``, and is sent without the rest of its storage."""
    values = tensor.detach()
    return values if values.untyped_storage().nbytes() == values.nbytes else values.clone()


def _storage(tensor: torch.Tensor) -> torch.Tensor:
    """All of the storage that ``tensor`` is in."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, (storage.nbytes() // tensor.itemsize,), (1,))


def _repeats(tensor: torch.Tensor) -> bool:
    """Whether it has elements in the same place, so that nothing can be copied there."""
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _parts_of(module: nn.Module) -> tuple:
    """What is in it, by name; a module that is only half made may have nothing yet."""
    parts = [vars(module).get(name) for name in PARTS]
    return tuple([(name, id(part)) for name, part in each.items()] if isinstance(each, dict) else each for each in parts)


def _parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]
