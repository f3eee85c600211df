"""Calls of libraries that read and write files by path in native code, without ``open``, as a table of patches.

A library is patched once it is imported. Calls outside the table are not intercepted.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import groupby
from pkgutil import resolve_name
from types import ModuleType
from typing import Any, Literal, NamedTuple
from urllib.parse import quote, unquote

from parwrap.intercept.patch import Patch, when_imported
from parwrap.rank_zero.calls import NativeFileCalls

__all__ = ["CALLS", "NativeCall", "native_patches"]


class NativeCall(NamedTuple):
    """A call that takes the path of a file.

    Attributes:
        module: its module, by the name under which the module is imported.
        name: the name of the function or class; for a class, ``__init__`` is patched if possible, so that subclasses are covered.
        way: ``"read"``: reads the file; ``"save"``: writes a whole file, which may be a checkpoint; ``"write"``: writes another whole
            file; ``"open"``: creates an object that reads or writes by its mode; ``"update"``: creates an object that reads and writes;
            ``"map"``: maps a file, which it also writes if the argument ``shared`` after the path is true.
        path: the name of the argument that is the path.
        position: its position, not counting ``self``.
        mode: for ``"open"``, the mode, if there is no argument ``mode`` after the path.
    """

    module: str
    name: str
    way: Literal["read", "save", "write", "open", "update", "map"]
    path: str
    position: int = 0
    mode: str | None = None


VOCABULARIES = ("WordLevel", "WordPiece")
"""The models of tokenizers that read a vocabulary from one file."""

CALLS = (
    NativeCall("torch", "from_file", "map", "filename"),
    NativeCall("torch.jit", "save", "save", "f", 1),
    NativeCall("torch.jit", "RecursiveScriptModule.save", "save", "f"),
    NativeCall("torch.jit", "ScriptModule.save", "save", "f"),  # of a traced one
    NativeCall("torch.jit", "load", "read", "f"),
    NativeCall("torch.export", "save", "save", "f", 1),
    NativeCall("torch.export", "load", "read", "f"),
    NativeCall("torch.autograd.profiler", "profile.export_chrome_trace", "write", "path"),
    NativeCall("torch.package", "PackageExporter.__init__", "open", "f", mode="w"),
    NativeCall("torch.package", "PackageImporter.__init__", "read", "file_or_buffer"),
    NativeCall("safetensors", "safe_open", "read", "filename"),
    NativeCall("safetensors", "serialize_file", "save", "filename", 1),
    NativeCall("safetensors.torch", "safe_open", "read", "filename"),
    NativeCall("safetensors.torch", "serialize_file", "save", "filename", 1),
    NativeCall("safetensors.numpy", "safe_open", "read", "filename"),
    NativeCall("safetensors.numpy", "serialize_file", "save", "filename", 1),
    NativeCall("tokenizers", "Tokenizer.save", "write", "path"),
    NativeCall("tokenizers", "Tokenizer.from_file", "read", "path"),
    NativeCall("tokenizers", "Tokenizer.train", "read", "files"),
    *(NativeCall("tokenizers.models", f"{kind}.from_file", "read", "vocab") for kind in VOCABULARIES),
    *(NativeCall("tokenizers.models", f"{kind}.read_file", "read", "vocab") for kind in VOCABULARIES),
    *(NativeCall("polars", f"read_{kind}", "read", "source") for kind in ("csv", "parquet", "ipc", "json", "ndjson")),
    *(NativeCall("polars", f"scan_{kind}", "read", "source") for kind in ("csv", "parquet", "ipc", "ndjson")),
    *(NativeCall("polars", f"DataFrame.write_{kind}", "write", "file") for kind in ("csv", "parquet", "ipc", "json", "ndjson")),
    NativeCall("h5py", "File.__init__", "open", "name"),
    NativeCall("h5py", "is_hdf5", "read", "fname"),
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


def native_patches(files: NativeFileCalls, is_checkpoint: Callable[[Any], bool]) -> list[AbstractContextManager]:
    """The patches that send all calls of ``CALLS`` to ``files``, as :func:`parwrap.rank_zero.calls.patches` does."""

    def of_module(calls: list[NativeCall]) -> Callable[[ModuleType], list[Patch]]:
        return lambda module: [_patch(module, call, files, is_checkpoint) for call in calls if hasattr(module, call.name.partition(".")[0])]

    return [when_imported(name, of_module(list(calls))) for name, calls in groupby(CALLS, lambda call: call.module)]


def _patch(module: ModuleType, call: NativeCall, files: NativeFileCalls, is_checkpoint: Callable[[Any], bool]) -> Patch:
    owner, _, name = call.name.rpartition(".")

    def called(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
        path = _path(call, args, kwargs)
        if isinstance(path, list):
            return _with_path(wrapped, call, [files.read_native(each, lambda place: place) for each in path], args, kwargs)
        if path is None:
            return wrapped(*args, **kwargs)
        path, coded = _taken_apart(path, bool(kwargs.get("uri")))

        def on_path(place: Any) -> Any:
            return _with_path(wrapped, call, coded(place), args, kwargs)

        mode = _mode(call, args, kwargs)
        if call.way == "save":
            return files.save(path, on_path, lambda: is_checkpoint(instance if owner else args[0] if args else kwargs))
        return files.write_native(path, mode, on_path) if set(mode) & set("wax+-") else files.read_native(path, on_path)

    return Patch(resolve_name(f"{module.__name__}:{owner}") if owner else module, name, called)


def _mode(call: NativeCall, args: tuple, kwargs: dict) -> str:
    """How the file is opened, in the form of ``open``; h5py's ``w-`` is ``x``."""
    after = args[call.position + 1] if len(args) > call.position + 1 else None
    if call.way == "map":
        return "a+" if kwargs.get("shared", after) else "r"
    if call.way != "open":
        return {"read": "r", "update": "a+"}.get(call.way, "w")
    return call.mode or kwargs.get("mode", after) or "r"


def _taken_apart(path: Any, is_uri: bool) -> tuple[Any, Callable[[Any], Any]]:
    """The path that ``path`` names, which may be a URI, and a function that writes another path in the same form."""
    text = os.fsdecode(path)
    if not is_uri or not text.startswith("file:"):
        return path, lambda place: place
    inner, mark, options = text.removeprefix("file:").partition("?")
    return unquote(inner).removeprefix("//"), lambda place: f"file:{quote(os.fsdecode(place))}{mark}{options}"


def _path(call: NativeCall, args: tuple, kwargs: dict) -> Any:
    """The path among the arguments of ``call``, or a list of paths to read; ``None`` if it names no file on this machine."""
    path = kwargs.get(call.path, args[call.position] if len(args) > call.position else None)
    if call.way == "read" and isinstance(path, (list, tuple)) and all(isinstance(each, (str, os.PathLike)) for each in path):
        return list(path)
    if not isinstance(path, (str, bytes, os.PathLike)) or kwargs.get("filesystem") is not None:
        return None
    text = os.fsdecode(path)
    elsewhere = ("://" in text and not text.startswith("file:")) or ":memory:" in text or "mode=memory" in text
    return None if elsewhere else path or None


def _with_path(wrapped: Callable, call: NativeCall, place: Any, args: tuple, kwargs: dict) -> Any:
    if call.path in kwargs:
        return wrapped(*args, **{**kwargs, call.path: place})
    return wrapped(*args[: call.position], place, *args[call.position + 1 :], **kwargs)
