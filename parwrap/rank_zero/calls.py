"""The calls of Python that open, change or look at paths, as a table of patches.

pathlib, shutil, json, numpy, pandas, matplotlib and similar libraries all use these calls. Some modules hold such a function under another
name. ``native_calls.py`` has the libraries that open files in native code.
"""

from __future__ import annotations

import builtins
import bz2
import glob
import inspect
import io
import multiprocessing.process
import os
import pathlib
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple, Protocol

from numpy.lib._datasource import _FileOpeners  # type: ignore[attr-defined]
from torch.serialization import default_restore_location

from parwrap.intercept.patch import Patch, caller, is_patched
from parwrap.intercept.torch_calls import SERIALIZATION
from parwrap.rank_zero.last_read import LastRead
from parwrap.ranks.device import accelerator
from parwrap.ranks.stdin import check_opening

__all__ = ["Change", "FileCalls", "NativeFileCalls", "Opening", "patches", "save_patches", "writes"]

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
UNNAMED = getattr(os, "O_TMPFILE", 0)

OPENS = ((builtins, "open"), (io, "open"), (tarfile, "bltn_open"), (bz2, "_builtin_open"))
LOOKS = ("stat", "lstat", "access", "readlink", "chdir", "fchdir", "statvfs", "getxattr", "listxattr")
LISTINGS = ("listdir", "scandir")
ATTRIBUTES = ("chmod", "lchmod", "chown", "lchown", "utime", "setxattr", "removexattr", "chflags", "lchflags")

HOLDERS = tuple(
    getattr(module, name)
    for module, name in ((pathlib, "_normal_accessor"), (glob, "_StringGlobber"), (glob, "_PathGlobber"))
    if hasattr(module, name)
)
"""Objects that keep their own references to functions of ``os``: in pathlib of Python 3.10 and glob of Python 3.13."""


def writes(flags: int) -> bool:
    """Whether ``os.open`` with ``flags`` may change what is at its path. A temporary file without a name is each rank's own.

    >>> [writes(flags) for flags in (os.O_RDONLY, os.O_RDWR, os.O_RDWR | UNNAMED)]
    [False, True, False]
    """
    return bool(flags & WRITING) and not (UNNAMED and flags & UNNAMED == UNNAMED)


class Opening(NamedTuple):
    """A call of ``open``, with its arguments by their names."""

    original: Callable
    file: Any
    mode: str = "r"
    buffering: int = -1
    encoding: Any = None
    errors: Any = None
    newline: Any = None
    closefd: bool = True
    opener: Any = None

    def run(self) -> Any:
        """Do what ``open`` does."""
        return self.original(*self[1:])

    @property
    def writes(self) -> bool:
        """Whether it may change the file.

        >>> [Opening(open, "a", mode).writes for mode in ("rb", "r+", "at")]
        [False, True, True]
        """
        return isinstance(self.mode, str) and not {"w", "a", "x", "+"}.isdisjoint(self.mode)

    @property
    def is_valid(self) -> bool:
        """Whether ``open`` accepts the mode, alone and with ``encoding``, ``errors`` and ``newline``.

        If not, ``open`` raises before it makes a file.
        """
        kinds = set(self.mode)
        return (
            len(kinds) == len(self.mode)
            and kinds <= set("rwaxbt+")
            and len(kinds & set("rwax")) == 1
            and not {"b", "t"} <= kinds
            and ("b" not in kinds or (self.encoding, self.errors, self.newline) == (None, None, None))
        )


class Change(NamedTuple):
    """A call that creates, removes or moves paths.

    Attributes:
        name: the name of the function: ``"mkdir"``, ``"truncate"``, ``"rmdir"``, ``"remove"``, ``"unlink"``, ``"rmtree"``, ``"rename"``,
            ``"replace"``, ``"link"``, ``"symlink"`` or ``"copyfile"``.
        run: a function that runs the call.
        gone: a path that does not exist afterwards, and the descriptor of the folder that it is relative to (``None`` for no descriptor).
        made: in the same form, a path that exists, or is a different file, afterwards.
        source: in the same form, the path whose content ``made`` has afterwards.
        target: the target of a symbolic link.
        options: the other arguments.
    """

    name: str
    run: Callable[[], Any]
    gone: tuple[Any, int | None] | None = None
    made: tuple[Any, int | None] | None = None
    source: tuple[Any, int | None] | None = None
    target: Any = None
    options: tuple[tuple, dict] = ((), {})


class NativeFileCalls(Protocol):
    """Handles ``torch.save`` and the calls of ``native_calls.py``."""

    def save(self, file: Any, write: Callable[[Any], Any], is_checkpoint: Callable[[], bool]) -> Any: ...
    def read_native(self, path: Any, read: Callable[[Any], Any]) -> Any: ...
    def write_native(self, path: Any, mode: str, write: Callable[[Any], Any]) -> Any: ...


class FileCalls(NativeFileCalls, Protocol):
    """Handles all calls, each kind by one method. ``writer.py`` has it for rank 0, ``replica.py`` for ranks that write to scratch."""

    last_read: LastRead

    def open(self, call: Opening) -> Any: ...
    def open_descriptor(self, original: Callable, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int: ...
    def look(self, name: str, original: Callable, path: Any, args: tuple, kwargs: dict) -> Any: ...
    def listing(self, name: str, original: Callable, path: Any, args: tuple, kwargs: dict) -> Any: ...
    def attribute(self, name: str, original: Callable, path: Any, args: tuple, kwargs: dict) -> Any: ...
    def change(self, change: Change) -> Any: ...
    def working_directory(self, original: Callable[[], str]) -> str: ...
    def temporary_name(self, name: str) -> str: ...
    def run_command(self, run: Callable[[], Any], command: Any) -> Any: ...


def patches(files: FileCalls, is_checkpoint: Callable[[Any], bool]) -> list[Patch | AbstractContextManager]:
    """The patches that send all calls of this file to ``files``. ``is_checkpoint`` says whether a saved object is a checkpoint."""
    return [
        *_open_patches(files),
        *_change_patches(files),
        *_on_paths(files.look, LOOKS),
        *_on_paths(files.listing, LISTINGS),
        *_on_paths(files.attribute, ATTRIBUTES),
        *_command_patches(files),
        *save_patches(files, is_checkpoint),
        *(Patch(module, "load", _loading(files)) for module in SERIALIZATION),
        Patch(os, "getcwd", lambda wrapped, instance, args, kwargs: files.working_directory(wrapped)),
        Patch(tempfile._RandomNameSequence, "__next__", lambda wrapped, *_: files.temporary_name(wrapped())),  # type: ignore[attr-defined]
        *map(_holding_patched_calls, HOLDERS),
    ]


def _open_patches(files: FileCalls) -> list[Patch]:
    def open(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
        call = Opening(wrapped, *args, **kwargs)
        check_opening(call.file)
        stream = files.open(call)
        files.last_read.opened(call.file, stream, call.writes)
        return stream

    def opener(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Callable:
        found = wrapped(*args, **kwargs)
        return builtins.open if found is original else found

    def open_descriptor(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> int:
        return files.open_descriptor(wrapped, *args, **kwargs)

    original = builtins.open
    opens = [Patch(owner, name, open) for owner, name in OPENS if hasattr(owner, name)]
    return [*opens, Patch(_FileOpeners, "__getitem__", opener), Patch(os, "open", open_descriptor)]


def _change_patches(files: FileCalls) -> list[Patch]:
    def made(name: str, run: Callable, path: Any, *args: Any, dir_fd: int | None = None) -> Change:
        return Change(name, run, made=(path, dir_fd), options=(args, {}))

    def gone(name: str, run: Callable, path: Any, *args: Any, dir_fd: int | None = None, **options: Any) -> Change:
        return Change(name, run, gone=(path, dir_fd), options=(args, options))

    def moved(name: str, run: Callable, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> Change:
        return Change(name, run, gone=(src, src_dir_fd), made=(dst, dst_dir_fd))

    def link(
        name: str, run: Callable, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None, **options: Any
    ) -> Change:
        return Change(name, run, made=(dst, dst_dir_fd), source=(src, src_dir_fd))

    def symlink(name: str, run: Callable, src: Any, dst: Any, target_is_directory: bool = False, *, dir_fd: int | None = None) -> Change:
        return Change(name, run, made=(dst, dir_fd), target=src)

    def copyfile(name: str, run: Callable, src: Any, dst: Any, *, follow_symlinks: bool = True) -> Change:
        return Change(name, run, made=(dst, None), source=(src, None), options=((), {"follow_symlinks": follow_symlinks}))

    def patch(owner: Any, name: str, taken_apart: Callable[..., Change]) -> Patch:
        def change(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
            return files.change(taken_apart(name, partial(wrapped, *args, **kwargs), *args, **kwargs))

        return Patch(owner, name, change)

    forms: dict[Callable[..., Change], tuple[str, ...]] = {
        made: ("mkdir", "truncate"),
        gone: ("rmdir", "remove", "unlink"),
        moved: ("rename", "replace"),
        link: ("link",),
        symlink: ("symlink",),
    }
    of_os = [patch(os, name, form) for form, names in forms.items() for name in names]
    # rmtree removes by descriptors, and a checkpoint is copied without its content
    return [*of_os, patch(shutil, "rmtree", gone), patch(shutil, "copyfile", copyfile)]


def _on_paths(method: Callable, names: tuple[str, ...]) -> list[Patch]:
    """Patches that send calls of the functions ``names`` of ``os`` to ``method``. Their first argument is a path.

    Functions that this system does not have are left out.
    """

    def patch(name: str) -> Patch:
        def on_path(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
            if args:
                return method(name, wrapped, args[0], args[1:], kwargs)
            path = kwargs.get("path", kwargs.get("fd", "."))
            return method(name, wrapped, path, (), {key: value for key, value in kwargs.items() if key not in ("path", "fd")})

        return Patch(os, name, on_path)

    return [patch(name) for name in names if hasattr(os, name)]


def _command_patches(files: FileCalls) -> list[Patch]:
    def run(wrapped: Callable, process: Any, args: tuple, kwargs: dict) -> Any:
        return files.run_command(partial(wrapped, *args, **kwargs), args[0] if args else kwargs.get("args", kwargs.get("command")))

    def start(wrapped: Callable, process: Any, args: tuple, kwargs: dict) -> Any:
        # the workers of a loader run all the time, and write for themselves
        works_for_loader = caller().f_globals.get("__name__", "").startswith("torch.utils.data.")
        return wrapped() if works_for_loader else files.run_command(wrapped, None)

    started = Patch(multiprocessing.process.BaseProcess, "start", start)
    return [Patch(subprocess.Popen, "__init__", run), Patch(os, "system", run), started]


def save_patches(files: NativeFileCalls, is_checkpoint: Callable[[Any], bool]) -> list[Patch]:
    """The patches that send ``torch.save`` to ``files``."""

    def save(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> None:
        def with_file(obj: Any, f: Any, *rest: Any, **options: Any) -> None:
            files.save(f, lambda file: wrapped(obj, file, *rest, **options), lambda: is_checkpoint(obj))

        with_file(*args, **kwargs)

    return [Patch(module, "save", save) for module in SERIALIZATION]


def _loading(files: FileCalls) -> Callable:
    def load(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
        def with_file(f: Any, map_location: Any = None, *rest: Any, **options: Any) -> Any:
            def read(file: Any) -> Any:
                return wrapped(file, _on_own_gpu(map_location), *rest, **options)

            return files.read_native(f, read) if isinstance(f, (str, os.PathLike)) else read(f)

        return with_file(*args, **kwargs)

    return load


def _on_own_gpu(location: Any) -> Any:
    """The ``map_location`` that loads onto this rank's GPU, whichever GPU ``location`` names or the file was saved on."""
    kind = accelerator()
    if kind is None:
        return location
    if location is None:
        return lambda storage, saved_from: default_restore_location(storage, kind) if saved_from.startswith(kind) else storage
    return kind if str(location).startswith(kind) else location


@contextmanager
def _holding_patched_calls(holder: Any) -> Iterator[None]:
    """Inside the block, the references of ``holder`` to patched functions of ``os`` and ``io`` lead to the patches."""
    names = [(module, name) for module in (os, io) for name, value in vars(module).items() if is_patched(value)]
    patched = {id(inspect.unwrap(getattr(module, name))): (module, name) for module, name in names}

    def call(module: ModuleType, name: str) -> Callable:
        return lambda *args, **kwargs: getattr(module, name)(*args, **kwargs)

    held = {name: patched[id(value)] for name in dir(holder) if id(value := getattr(holder, name)) in patched}
    before = {name: vars(holder)[name] for name in held if name in vars(holder)}
    for name, place in held.items():
        setattr(holder, name, staticmethod(call(*place)) if isinstance(holder, type) else call(*place))
    try:
        yield
    finally:
        for name in held:
            if name in before:
                setattr(holder, name, before[name])
            else:
                delattr(holder, name)
