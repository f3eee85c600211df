"""``open`` and the calls of ``os`` that open, change or inspect paths: forward them to the interceptor.

pathlib, shutil, json, numpy, pandas, matplotlib and similar libraries all call these. Some modules hold ``open`` under another name. Files
that native code opens are not intercepted here.
"""

from __future__ import annotations

import builtins
import bz2
import io
import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from numpy.lib._datasource import _FileOpeners  # type: ignore[attr-defined]

from parwrap.intercept.interceptor import Interceptor
from parwrap.patching.patch import Patch

__all__ = [
    "WRITING",
    "Change",
    "Opening",
    "attribute_patches",
    "change_patches",
    "close_descriptor_patches",
    "listing_patches",
    "look_patches",
    "open_descriptor_patches",
    "open_patches",
    "temporary_name_patches",
]

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
"""The flags of ``os.open`` that allow a file to be changed."""

OPENS = ((builtins, "open"), (io, "open"), (tarfile, "bltn_open"), (bz2, "_builtin_open"))
LOOKS = ("stat", "lstat", "access", "readlink", "chdir", "statvfs", "getxattr", "listxattr")
ATTRIBUTES = ("chmod", "lchmod", "chown", "lchown", "utime", "setxattr", "removexattr", "chflags", "lchflags")


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


class Change(NamedTuple):
    """A call that creates, removes or moves paths.

    Attributes:
        name: the name of the function: ``"mkdir"``, ``"truncate"``, ``"rmdir"``, ``"remove"``, ``"unlink"``, ``"rmtree"``, ``"rename"``,
            ``"replace"``, ``"link"`` or ``"symlink"``.
        run: a function that runs the call.
        gone: a path that does not exist afterwards and the descriptor that it is relative to, or ``None``.
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


def open_patches(interceptor: Interceptor) -> list[Patch]:
    def open(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
        return interceptor.open(Opening(wrapped, *args, **kwargs))

    def opener(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Callable:
        found = wrapped(*args, **kwargs)
        return builtins.open if found is original else found

    original = builtins.open
    patches = [Patch(owner, name, open) for owner, name in OPENS if hasattr(owner, name)]
    return [*patches, Patch(_FileOpeners, "__getitem__", opener)]


def open_descriptor_patches(interceptor: Interceptor) -> list[Patch]:
    def open(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> int:
        return interceptor.open_descriptor(wrapped, *args, **kwargs)

    return [Patch(os, "open", open)]


def close_descriptor_patches(interceptor: Interceptor) -> list[Patch]:
    def close(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> None:
        interceptor.close_descriptor(wrapped, *args, **kwargs)

    return [Patch(os, "close", close)]


def change_patches(interceptor: Interceptor) -> list[Patch]:
    def made(name: str, run: Callable, path: Any, *args: Any, dir_fd: int | None = None) -> Change:
        return Change(name, run, made=(path, dir_fd), options=(args, {}))

    def gone(name: str, run: Callable, path: Any, *args: Any, dir_fd: int | None = None, **options: Any) -> Change:
        return Change(name, run, gone=(path, dir_fd), options=(args, options))

    def moved(name: str, run: Callable, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> Change:
        return Change(name, run, gone=(src, src_dir_fd), made=(dst, dst_dir_fd), source=(src, src_dir_fd))

    def link(
        name: str, run: Callable, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None, **options: Any
    ) -> Change:
        return Change(name, run, made=(dst, dst_dir_fd), source=(src, src_dir_fd))

    def symlink(name: str, run: Callable, src: Any, dst: Any, target_is_directory: bool = False, *, dir_fd: int | None = None) -> Change:
        return Change(name, run, made=(dst, dir_fd), target=src)

    def patch(owner: Any, name: str, taken_apart: Callable[..., Change]) -> Patch:
        def change(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
            return interceptor.change(taken_apart(name, partial(wrapped, *args, **kwargs), *args, **kwargs))

        return Patch(owner, name, change)

    forms: dict[Callable[..., Change], tuple[str, ...]] = {
        made: ("mkdir", "truncate"),
        gone: ("rmdir", "remove", "unlink"),
        moved: ("rename", "replace"),
        link: ("link",),
        symlink: ("symlink",),
    }
    return [patch(os, name, form) for form, names in forms.items() for name in names] + [patch(shutil, "rmtree", gone)]


def attribute_patches(interceptor: Interceptor) -> list[Patch]:
    return _on_paths(interceptor.attribute, ATTRIBUTES)


def look_patches(interceptor: Interceptor) -> list[Patch]:
    return _on_paths(interceptor.look, LOOKS)


def listing_patches(interceptor: Interceptor) -> list[Patch]:
    return _on_paths(interceptor.listing, ("listdir", "scandir"))


def temporary_name_patches(interceptor: Interceptor) -> list[Patch]:
    def name(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> str:
        return interceptor.temporary_name(wrapped())

    return [Patch(tempfile._RandomNameSequence, "__next__", name)]  # type: ignore[attr-defined]


def _on_paths(method: Callable, names: tuple[str, ...]) -> list[Patch]:
    """Patches of those functions in ``names`` that this system has, whose first argument is a path. They call ``method``."""

    def patch(name: str) -> Patch:
        def on_path(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
            if args:
                return method(name, wrapped, args[0], args[1:], kwargs)
            path = kwargs.get("path", ".")
            return method(name, wrapped, path, (), {key: value for key, value in kwargs.items() if key != "path"})

        return Patch(os, name, on_path)

    return [patch(name) for name in names if hasattr(os, name)]
