"""Places in the user's script: where a running call comes from, and warnings that point there."""

from __future__ import annotations

import functools
import linecache
import os
import sys
import threading
import warnings
from types import CodeType, FrameType
from typing import NamedTuple

import torch

__all__ = [
    "Line",
    "Place",
    "begin_here",
    "call_site",
    "call_stack",
    "codes_of",
    "from_script",
    "is_installed",
    "is_ours",
    "is_standard",
    "module_name",
    "outside_of",
    "place_of",
    "running_line",
    "script_place",
    "warn",
]

_STANDARD = os.path.dirname(os.__file__) + os.sep
_INSTALLED = tuple(f"{os.sep}{folder}{os.sep}" for folder in ("site-packages", "dist-packages"))
_WRAPT = f"{os.sep}wrapt{os.sep}"
_OURS = tuple(os.path.dirname(str(module.__file__)) + os.sep for module in (torch, sys.modules["parwrap"]))


def _here() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was removed
        return "\0"


_began_in = _here()
"""The working directory before the script may have changed it, as Hydra does."""

DEPTH = 6
"""The number of frames that identify a call. So two calls of a helper function of the script differ, although they run the same line."""


class Place(NamedTuple):
    """A line of the user's script.

    >>> str(Place("/home/me/train.py", 31))
    'train.py:31'
    """

    file: str
    line: int

    def __str__(self) -> str:
        return f"{_name_of(self.file)}:{self.line}"


def _name_of(file: str) -> str:
    """What the user calls ``file``: a script's name without its folders, or the number of a notebook's cell, ``In[2]``."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    cell = shell.compile.format_code_name(file) if shell is not None else None
    return os.path.basename(file) if cell is None else cell[1]


def script_place(frame: FrameType | None = None) -> Place:
    """The line in the user's script where the running call comes from: that of the innermost frame of the script.

    If no frame is the script's, it is that of the innermost frame of a library other than torch and parwrap.

    Args:
        frame: the frame to begin at; by default the caller's.
    """
    innermost = frame = sys._getframe(1) if frame is None else frame
    outside = None
    while frame is not None:
        kind = _kind_of(frame)
        if kind == SCRIPT:
            return Place(frame.f_code.co_filename, frame.f_lineno)
        if kind == LIBRARY and outside is None:
            outside = frame
        frame = frame.f_back
    found = outside or innermost
    return Place(found.f_code.co_filename, found.f_lineno)


def running_line() -> str:
    """The line of the script or of a library that the running call comes from: ``file:line``."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (is_ours(frame.f_code.co_filename) or is_standard(frame.f_code.co_filename)):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def warn(text: str) -> None:
    """Give the warning ``text``, with the line of the script that the running call comes from.

    If this thread runs no code of the script, the line is that of the main thread; after the script's end, its last line.
    """
    frame = _script_frame(sys._getframe(1)) or _script_frame(sys._current_frames().get(threading.main_thread().ident or 0))
    if frame is None:
        warnings.warn_explicit(text, UserWarning, sys.argv[0], len(linecache.getlines(sys.argv[0])))
        return
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno, frame.f_globals["__name__"], registry)


def _script_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the script, from ``frame`` outwards; ``None`` if there is none.

    A frame without a module does not count: the fork server's command runs in one.
    """
    while frame is not None and not (frame.f_globals.get("__name__") and _kind_of(frame) == SCRIPT):
        frame = frame.f_back
    return frame


def call_site(frame: FrameType | None) -> tuple[tuple[int, ...], FrameType | None]:
    """A key for the running call, and the frame that makes it: the innermost one that is not torch's or parwrap's.

    The key has the line that calls and those of the calls around it, with the ids of their code objects. Keep these, :func:`codes_of`, as
    long as the key, or other objects may get their ids.
    """
    while frame is not None and is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    innermost, depth = frame, 0
    key: list[int] = []
    while frame is not None and depth < DEPTH:
        key += (id(frame.f_code), frame.f_lineno)
        frame, depth = frame.f_back, depth + 1
    return tuple(key), innermost


def codes_of(frame: FrameType | None) -> tuple[CodeType, ...]:
    """The code objects of ``frame`` and of the calls around it, as many as a key of :func:`call_site` has."""
    found = list[CodeType]()
    while frame is not None and len(found) < DEPTH:
        found.append(frame.f_code)
        frame = frame.f_back
    return tuple(found)


class Line(NamedTuple):
    """A line of a call stack.

    Attributes:
        file: the source file.
        function: the first line of the function.
        line: the line that runs.
        in_script: whether it is the user's code, and not a library's.
    """

    file: str
    function: int
    line: int
    in_script: bool

    def is_in(self, other: Line) -> bool:
        """Whether both lines are of one function."""
        return (self.file, self.function) == (other.file, other.function)


def call_stack(frame: FrameType | None) -> tuple[Line, ...]:
    """The lines that lead to ``frame``, outermost first: the script's and those of libraries other than torch and parwrap."""
    lines = []
    while frame is not None:
        kind, code = _kind_of(frame), frame.f_code
        if kind in (SCRIPT, LIBRARY):
            lines.append(Line(code.co_filename, code.co_firstlineno, frame.f_lineno, kind == SCRIPT))
        frame = frame.f_back
    return tuple(reversed(lines))


def place_of(lines: tuple[Line, ...], frame: FrameType | None) -> Place:
    """The :func:`script_place` of ``frame``, from the ``lines`` of its :func:`call_stack`."""
    found = next((each for each in reversed(lines) if each.in_script), lines[-1] if lines else None)
    return script_place(frame) if found is None else Place(found.file, found.line)


def from_script(frame: FrameType | None) -> bool:
    """Whether ``frame`` runs the script's code: ``__main__``, a module of its package, or a file in one of the script's directories.

    These are the folder of the script and the working directory in which it began, with all below them. Other packages that are installed
    are not the script's, wherever they are. For a frame of the standard library, such as ``threading``, the frame around it decides. If no
    frame decides, the answer is true.
    """
    while frame is not None:
        kind = _kind_of(frame)
        if kind != PASSING:
            return kind == SCRIPT
        frame = frame.f_back
    return True


def outside_of(frame: FrameType | None, *packages: str) -> FrameType | None:
    """The first frame, from ``frame`` outwards, whose module is in none of ``packages``; ``None`` if there is none."""
    while frame is not None and module_name(frame).partition(".")[0] in packages:
        frame = frame.f_back
    return frame


def module_name(frame: FrameType) -> str:
    """The name of the module that ``frame`` runs; empty if it has none."""
    return frame.f_globals.get("__name__") or ""


@functools.cache
def is_ours(file: str) -> bool:
    """Whether the source ``file`` belongs to torch, to parwrap, or to wrapt, which has frames where its C extension is missing."""
    return file.startswith(_OURS) or _WRAPT in file


def is_installed(file: str) -> bool:
    """Whether the source ``file`` belongs to an installed package."""
    return any(folder in file for folder in _INSTALLED)


def is_standard(file: str) -> bool:
    """Whether the source ``file`` belongs to the standard library."""
    return file.startswith(_STANDARD) and not is_installed(file)


def begin_here() -> None:
    """Save the working directory in which a command begins: the path of its script may be relative to it."""
    global _began_in
    _began_in = _here()
    _kind.cache_clear()


SCRIPT, LIBRARY, OURS, PASSING = range(4)
"""Whose code it is: the user's, a library's, torch's or parwrap's, or code that only calls others, as the standard library."""


def _kind_of(frame: FrameType) -> int:
    """Whose code ``frame`` runs: ``SCRIPT``, ``LIBRARY``, ``OURS`` or ``PASSING``. The script's own package is ``SCRIPT`` in any folder."""
    kind = _kind(frame.f_code.co_filename)
    return SCRIPT if kind == LIBRARY and _in_main_package(frame) else kind


@functools.cache
def _kind(file: str) -> int:
    """Whose code the source ``file`` contains, by its path alone: ``SCRIPT``, ``LIBRARY``, ``OURS`` or ``PASSING``."""
    if file.startswith("<frozen ") or is_standard(file) or _WRAPT in file:
        return PASSING
    if is_ours(file):
        return OURS
    return LIBRARY if is_installed(file) or not _is_in_script_directory(file) else SCRIPT


def _is_in_script_directory(file: str) -> bool:
    """Whether ``file`` is below the script's directory or below the working directory in which it began.

    Other files may be libraries in a folder of ``PYTHONPATH``.
    """
    began_in = os.path.join(_began_in, "")
    script, path = (os.path.normpath(os.path.join(began_in, each)) for each in (sys.argv[0], file))
    return path.startswith((began_in, os.path.join(os.path.dirname(script), "")))


def _in_main_package(frame: FrameType) -> bool:
    """Whether ``frame`` belongs to ``__main__`` or a module of its package: a cell of a notebook, or a package that ``python -m`` runs."""
    name, main = module_name(frame), getattr(sys.modules["__main__"], "__package__", None)
    return name == "__main__" or bool(main and name.partition(".")[0] == main.partition(".")[0])
