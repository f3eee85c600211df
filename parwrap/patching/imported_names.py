"""Names that a module has imported by value, as ``from torch import save`` leaves behind: what is patched is exchanged there too.

Looked through are the modules of the user, and all of the package that the running function is from; the standard library and what is
installed work as they are. Names in other places (defaults of arguments, attributes of classes) stay what they are.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

__all__ = ["Namespaces", "is_installed", "is_standard"]

_STANDARD = os.path.dirname(os.__file__) + os.sep
_INSTALLED = tuple(f"{os.sep}{folder}{os.sep}" for folder in ("site-packages", "dist-packages"))
_NEVER = ("torch", "parwrap")


def is_installed(file: str) -> bool:
    """Whether the source ``file`` is of an installed package."""
    return any(folder in file for folder in _INSTALLED)


def is_standard(file: str) -> bool:
    """Whether the source ``file`` is of the standard library."""
    return file.startswith(_STANDARD) and not is_installed(file)


class Namespaces:
    """The names of the modules to look through, as they are loaded now.

    Args:
        module: the name of the one that the running function is from.

    >>> import math
    >>> sys.modules["script"] = script = ModuleType("script")
    >>> script.__file__, script.root = "script.py", math.sqrt
    >>> Namespaces().exchange({id(math.sqrt): print})
    >>> script.root is print
    True
    >>> del sys.modules["script"]
    """

    def __init__(self, module: str | None = None) -> None:
        package = (module or "").partition(".")[0]
        self._names = tuple(sys.modules)
        by_owner = _by_owner(self._names)
        self._looked_through = _namespaces([*by_owner.get("", ()), *(by_owner.get(package, ()) if package else ())])

    def exchange(self, instead: Mapping[int, Any]) -> None:
        """Replace objects, which are given by their ids."""
        _exchange(self._looked_through, instead)

    def exchange_in_new(self, instead: Mapping[int, Any]) -> None:
        """The same, also in all modules that were loaded since, whosever they are: they have imported what was there."""
        names = tuple(sys.modules)
        new = () if names == self._names else {*names}.difference(self._names)
        _exchange([*self._looked_through, *_namespaces(new), vars(sys.modules["__main__"])], instead)  # a script is run in another


@functools.lru_cache(maxsize=8)
def _by_owner(names: tuple[str, ...]) -> dict[str, list[str]]:
    """Those of the loaded modules ``names`` that may be looked through: the user's under ``""``, and installed ones by package."""
    by_owner: dict[str, list[str]] = {}
    for name in names:
        owner = _owner(name, id(sys.modules.get(name)))
        if owner is not None:
            by_owner.setdefault(owner, []).append(name)
    return by_owner


@functools.lru_cache(maxsize=1 << 14)
def _owner(name: str, module_id: int) -> str | None:
    """Who owns the module ``name``; ``None`` if it is never looked through. A module is looked at once, not at each start."""
    if name == "__main__":
        return ""  # it has no file in a notebook
    package = name.partition(".")[0]
    file = getattr(sys.modules.get(name), "__dict__", {}).get("__file__")
    if package in _NEVER or not isinstance(file, str):
        return None
    if is_installed(file):
        return package
    return None if file.startswith(_STANDARD) else ""


def _namespaces(names: Iterable[str]) -> list[dict[str, Any]]:
    return [vars(module) for name in names if isinstance(module := sys.modules.get(name), ModuleType)]


def _exchange(namespaces: Iterable[dict[str, Any]], instead: Mapping[int, Any]) -> None:
    for names in namespaces:
        if not instead.keys().isdisjoint(map(id, list(names.values()))):
            names.update({name: instead[id(value)] for name, value in names.items() if id(value) in instead})
