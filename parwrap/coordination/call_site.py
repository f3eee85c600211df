"""Places in the user's script: finds where a running call comes from on the call stack."""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import sys
import threading
import warnings
from types import FrameType

import torch

from parwrap.patching.imported_names import is_installed, is_standard
from parwrap.torch_private.dynamo import source_directory

__all__ = ["call_site", "from_script", "innermost", "is_ours", "location", "outside", "trail", "warn", "worth_a_look"]

DEPTH = 10
"""The number of frames that identify a call site: enough to see through a script's own helper functions."""

_OURS = tuple(os.path.dirname(str(module.__file__)) + os.sep for module in (torch, sys.modules["parwrap"]))


_PASSING_ON = (contextlib.__file__, functools.__file__)
"""Code that leaves a scope or calls a wrapped function; it is never a place in the script."""


def call_site() -> tuple:
    """A key for the place in the user's script where the running call comes from; two callers of one helper have different keys."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back  # there are as many such frames as interceptors
    key: list[int] = []
    while frame is not None and len(key) < 2 * DEPTH:
        key += (id(frame.f_code), frame.f_lasti)  # hashing a code object covers all its contents, which takes longer than the walk
        frame = frame.f_back
    return tuple(key)


def trail() -> tuple[str, ...]:
    """The place of :func:`call_site` as file names and line numbers, innermost first, which identify it on other ranks."""
    frame: FrameType | None = sys._getframe(1)
    lines: list[str] = []
    while frame is not None and len(lines) < DEPTH:
        if lines or not is_ours(frame):
            lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        frame = frame.f_back
    return tuple(lines)


def worth_a_look(visits: int) -> bool:
    """Whether to check the ``visits``-th visit of a call site. Checks become ever rarer, so that their cost vanishes.

    >>> [visits for visits in range(1, 20) if worth_a_look(visits)]
    [1, 2, 4, 8, 16]
    """
    return visits & (visits - 1) == 0


def location() -> str:
    """File and line in the user's script where the running call comes from."""
    return innermost(sys._getframe(1))


def innermost(frame: FrameType) -> str:
    """File and line of the innermost frame around ``frame`` that neither belongs to torch or parwrap nor only calls into them."""
    while frame.f_back is not None and (is_ours(frame) or frame.f_code.co_filename in _PASSING_ON):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def is_ours(frame: FrameType) -> bool:
    """Whether ``frame`` runs code of torch or of parwrap."""
    return frame.f_code.co_filename.startswith(_OURS)


def outside(frame: FrameType, level: int) -> int:
    """``level``, raised to the first frame outside parwrap. Like ``warnings.warn``, it counts frames from ``frame`` outwards."""
    around: FrameType | None = frame
    for _ in range(level - 1):
        around = around and around.f_back
    while around is not None and around.f_code.co_filename.startswith(_OURS[1]):
        around, level = around.f_back, level + 1
    return level


def warn(text: str) -> None:
    """Warn at the script's innermost line in the running call, or at the script's last line if it has ended."""
    frame = _script_frame(sys._getframe(1)) or _script_frame(sys._current_frames().get(threading.main_thread().ident or 0))
    if frame is None:
        warnings.warn_explicit(text, UserWarning, sys.argv[0], len(linecache.getlines(sys.argv[0])))
        return
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno, frame.f_globals["__name__"], registry)


def _script_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the script around ``frame``, if it is in a module (the fork server's command is not)."""
    while frame is not None and not (frame.f_globals.get("__name__") and _is_script(frame)):
        frame = frame.f_back
    return frame


def from_script(frame: FrameType | None) -> bool:
    """Whether ``frame`` runs the script's code: ``__main__``, its package, and modules that are not installed.

    For frames of the standard library, such as ``threading``, the frames around them decide. While ``torch.compile`` traces code, that code
    decides.
    """
    while frame is not None:
        kind = _kind(frame.f_code.co_filename)
        if kind == TRACER and (traced := getattr(frame.f_locals.get("self"), "f_code", None)):
            kind = _kind(traced.co_filename)
        if kind == SCRIPT:
            return True
        if kind == LIBRARY:
            return not is_ours(frame) and _in_main_package(frame)
        frame = frame.f_back
    return True


def _is_script(frame: FrameType) -> bool:
    kind = _kind(frame.f_code.co_filename)
    return kind == SCRIPT or (kind == LIBRARY and not is_ours(frame) and _in_main_package(frame))


SCRIPT, LIBRARY, PASSING, TRACER = range(4)
_DYNAMO = source_directory()


@functools.cache
def _kind(file: str) -> int:
    """Whether the source ``file`` contains code of the user, of torch or of another library."""
    if file == _DYNAMO + "symbolic_convert.py":
        return TRACER  # its frames have the traced code in ``self.f_code``
    if file.startswith(("<frozen ", _DYNAMO + "variables")) or is_standard(file) or f"{os.sep}wrapt{os.sep}" in file:
        return PASSING
    return LIBRARY if file.startswith(_OURS) or is_installed(file) or not _is_in_script_directory(file) else SCRIPT


def _is_in_script_directory(file: str) -> bool:
    """Whether ``file`` is below the working directory or the script's directory. Other files may be libraries that ``PYTHONPATH`` names."""
    folders = os.getcwd(), os.path.dirname(os.path.abspath(sys.argv[0]))
    return any(os.path.abspath(file).startswith(os.path.join(folder, "")) for folder in folders)


def _in_main_package(frame: FrameType) -> bool:
    """Whether ``frame`` belongs to ``__main__`` or a module of its package, because ``python -m`` also runs installed packages."""
    name, main = frame.f_globals.get("__name__") or "", getattr(sys.modules["__main__"], "__package__", None)
    return name == "__main__" or bool(main and name.partition(".")[0] == main.partition(".")[0])
