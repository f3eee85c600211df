"""Calls of libraries that read and write files by path in native code, bypassing ``open``: forward them to the interceptor.

``CALLS`` is the table of these calls. A library is patched once it is imported. Calls outside the table are not intercepted.
"""

from __future__ import annotations

import inspect
import os
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import groupby
from pkgutil import resolve_name
from types import ModuleType
from typing import Any, Literal, NamedTuple
from urllib.parse import quote, unquote

from parwrap.intercept.interceptor import Interceptor
from parwrap.patching.patch import Patch, when_imported

__all__ = ["CALLS", "NativeCall", "patches"]


class NativeCall(NamedTuple):
    """A call that takes the path of a file.

    Attributes:
        module: its module, by the name under which the module is imported.
        name: the name of the function or class; for a class, ``__init__`` is patched if possible, so that subclasses are covered.
        way: ``"read"``: reads the file; ``"save"``: writes a whole checkpoint; ``"write"``: writes another whole file; ``"open"``: creates
            an object that writes until it is closed; ``"update"``: creates an object that reads and writes for an unknown time.
        path: the name of the argument.
        position: its position, not counting ``self``.
        mode: for ``"open"``, the mode, if there is no argument ``mode`` after the path.
    """

    module: str
    name: str
    way: Literal["read", "save", "write", "open", "update"]
    path: str
    position: int = 0
    mode: str | None = None


CALLS = (
    NativeCall("torch.jit", "save", "save", "f", 1),
    NativeCall("torch.jit", "RecursiveScriptModule.save", "save", "f"),
    NativeCall("torch.jit", "load", "read", "f"),
    NativeCall("torch.export", "save", "save", "f", 1),
    NativeCall("torch.export", "load", "read", "f"),
    NativeCall("torch.package", "PackageExporter.__init__", "open", "f", mode="w"),
    NativeCall("torch.package", "PackageImporter.__init__", "read", "file_or_buffer"),
    NativeCall("safetensors", "safe_open", "read", "filename"),
    NativeCall("safetensors", "serialize_file", "save", "filename", 1),
    NativeCall("safetensors.torch", "safe_open", "read", "filename"),
    NativeCall("safetensors.torch", "serialize_file", "save", "filename", 1),
    NativeCall("safetensors.numpy", "safe_open", "read", "filename"),
    NativeCall("safetensors.numpy", "serialize_file", "save", "filename", 1),
    NativeCall("h5py", "File.__init__", "open", "name"),
    NativeCall("sqlite3", "connect", "update", "database"),
    NativeCall("sqlite3.dbapi2", "connect", "update", "database"),
    NativeCall("cv2", "imwrite", "write", "filename"),
    NativeCall("cv2", "imread", "read", "filename"),
    NativeCall("cv2", "VideoWriter", "update", "filename"),
    NativeCall("cv2", "VideoCapture", "read", "filename"),
    NativeCall("soundfile", "SoundFile.__init__", "open", "file"),
    NativeCall("pyarrow", "OSFile", "open", "path"),
    NativeCall("pyarrow.parquet", "ParquetWriter.__init__", "open", "where", mode="w"),
    NativeCall("pyarrow.parquet", "ParquetFile.__init__", "read", "source"),
    NativeCall("pyarrow.parquet", "read_table", "read", "source"),
    NativeCall("pyarrow.feather", "write_feather", "write", "dest", 1),
    NativeCall("pyarrow.feather", "read_feather", "read", "source"),
    NativeCall("pyarrow.feather", "read_table", "read", "source"),
    NativeCall("pyarrow.csv", "write_csv", "write", "output_file", 1),
    NativeCall("pyarrow.csv", "CSVWriter", "open", "sink", mode="w"),
    NativeCall("pyarrow.csv", "read_csv", "read", "input_file"),
)

_closing: weakref.WeakKeyDictionary[Any, weakref.finalize] = weakref.WeakKeyDictionary()
"""Called when an object that writes to a file has been closed or garbage-collected."""


def patches(interceptor: Interceptor) -> list[AbstractContextManager]:
    """Calls ``save``, ``read_native``, ``write_native``, ``open_native`` and ``update_native`` with the path and a function of a path."""

    def of_module(calls: list[NativeCall]) -> Callable[[ModuleType], list[Patch]]:
        return lambda module: [patch for call in calls if _is_there(module, call) for patch in _patches_of(module, call, interceptor)]

    return [when_imported(name, of_module(list(calls))) for name, calls in groupby(CALLS, lambda call: call.module)]


def _is_there(module: ModuleType, call: NativeCall) -> bool:
    return hasattr(module, call.name.partition(".")[0])


def _patches_of(module: ModuleType, call: NativeCall, interceptor: Interceptor) -> list[Patch]:
    owner, _, name = call.name.rpartition(".")
    owned = resolve_name(f"{module.__name__}:{owner}") if owner else module
    if call.way != "open":
        on_path = {
            "read": interceptor.read_native,
            "save": interceptor.save,
            "write": interceptor.write_native,
            "update": interceptor.update_native,
        }
        return [Patch(owned, name, _on_path(call, on_path[call.way]))]
    if owner:
        return [Patch(owned, name, _opening(call, interceptor.open_native)), Patch(owned, "close", _close)]
    return [Patch(owned, name, _making(call, interceptor.open_native))]


def _on_path(call: NativeCall, on_path: Callable[[Any, Callable[[Any], Any]], Any]) -> Callable:
    def called(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
        path = _path(call, args, kwargs)
        if path is None:
            return wrapped(*args, **kwargs)
        coded: Callable[[Any], Any] = lambda place: place  # noqa: E731
        if kwargs.get("uri") and (address := os.fsdecode(path)).startswith("file:"):
            path, mark, options = address.removeprefix("file:").partition("?")
            path, coded = unquote(path).removeprefix("//"), lambda place: f"file:{quote(os.fsdecode(place))}{mark}{options}"
        return on_path(path, lambda place: _with_path(wrapped, call, coded(place), args, kwargs))

    return called


def _opening(call: NativeCall, open_native: Callable) -> Callable:
    def init(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> None:
        _opened(call, open_native, wrapped, args, kwargs, lambda result: instance)

    return init


def _making(call: NativeCall, open_native: Callable) -> Callable:
    """Patch an extension class. Its methods cannot be replaced, so a subclass with another method for closing takes its place."""

    def make(wrapped: Any, instance: Any, args: tuple, kwargs: dict) -> Any:
        def close(made: Any, *given: Any, **options: Any) -> Any:
            return _close(super(watched, made).close, made, given, options)

        watched: Any = type(wrapped.__name__, (inspect.unwrap(wrapped),), {"close": close})
        return _opened(call, open_native, watched, args, kwargs, lambda result: result)

    return make


def _opened(call: NativeCall, open_native: Callable, wrapped: Callable, args: tuple, kwargs: dict, opened: Callable[[Any], Any]) -> Any:
    """The result of ``wrapped``, opening the file that the interceptor chooses; ``opened`` returns the object to close."""
    path = _path(call, args, kwargs)
    if path is None:
        return wrapped(*args, **kwargs)
    given = kwargs.get("mode", args[call.position + 1] if len(args) > call.position + 1 else None)

    def open_at(place: Any, closed: Callable[[], None] | None) -> Any:
        result = _with_path(wrapped, call, place, args, kwargs)
        if closed:
            _closing[opened(result)] = weakref.finalize(opened(result), closed)
        return result

    return open_native(path, call.mode or given or "r", open_at)


def _close(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
    try:
        return wrapped(*args, **kwargs)
    finally:
        if closed := _closing.pop(instance, None):
            closed()


def _path(call: NativeCall, args: tuple, kwargs: dict) -> Any:
    """The path, if it names a file on this machine."""
    path = kwargs.get(call.path, args[call.position] if len(args) > call.position else None)
    if not isinstance(path, (str, bytes, os.PathLike)) or kwargs.get("filesystem") is not None:
        return None
    text = os.fsdecode(path)
    elsewhere = ("://" in text and not text.startswith("file:")) or ":memory:" in text or "mode=memory" in text
    return None if elsewhere else path or None


def _with_path(wrapped: Callable, call: NativeCall, place: Any, args: tuple, kwargs: dict) -> Any:
    if call.path in kwargs:
        return wrapped(*args, **{**kwargs, call.path: place})
    return wrapped(*args[: call.position], place, *args[call.position + 1 :], **kwargs)
