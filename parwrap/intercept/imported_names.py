"""Names that a module imported by value, such as with ``from torch import save``: patches replace them there too.

This file searches the user's modules and the whole package of the running function. It does not search the standard library and other
installed packages. It also handles ``functools.partial`` objects and dicts in a module, but not default arguments or class attributes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Mapping
from itertools import islice
from types import ModuleType
from typing import Any

from parwrap.places import is_installed, is_standard

__all__ = ["Namespaces", "note_loaded_modules"]

_NEVER = ("torch", "parwrap")
_MOST_NAMES = 1000
"""A dict with more entries is data, not a table of functions."""


class Namespaces:
    """The global names of the loaded modules that have to be searched.

    Args:
        module: the name of the running function's module, whose package is searched even if it is installed.

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
        by_owner = _loaded.by_owner()
        self._names, self._known = _loaded.names, len(_loaded.names)
        self._looked_through = _namespaces([*by_owner.get("", ()), *(by_owner.get(package, ()) if package else ())])

    def exchange(self, instead: Mapping[int, Any]) -> None:
        """Replace objects: ``instead`` has the new object for the id of each old one."""
        _exchange(self._looked_through, instead)

    def exchange_in_new(self, instead: Mapping[int, Any]) -> None:
        """Replace objects as :meth:`exchange` does, also in all modules that were loaded since.

        It undoes patches: those modules may have imported the wrappers.
        """
        _loaded.by_owner()
        new: Iterable[str] = _loaded.names[self._known :]
        if _loaded.names is not self._names:
            new = {*_loaded.names}.difference(self._names[: self._known])
        _exchange([*self._looked_through, *_namespaces(new), vars(sys.modules["__main__"])], instead)  # a script runs in another module


class _Loaded:
    """The modules loaded so far. Each is looked at once: in a forked process a look at a module copies a page of memory.

    Attributes:
        names: the names of the modules, in the order of ``sys.modules``; a new list object when modules have been unloaded.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._by_owner: dict[str, list[str]] = {}

    def by_owner(self) -> dict[str, list[str]]:
        """The names of the modules that may have to be searched: the user's under ``""``, installed ones under their package."""
        added = len(sys.modules) - len(self.names)
        *new, last = islice(reversed(sys.modules), max(0, added) + 1)
        if added >= 0 and [last] == self.names[-1:]:
            new.reverse()
        else:  # some have been unloaded
            new, self.names, self._by_owner = list(sys.modules), [], {}
        for name in new:
            owner = _owner(name, id(sys.modules.get(name)))
            if owner is not None:
                self._by_owner.setdefault(owner, []).append(name)
        self.names += new
        return self._by_owner


def note_loaded_modules() -> None:
    """Look at all loaded modules now, so that the processes forked from this one need not."""
    _loaded.by_owner()


@functools.lru_cache(maxsize=1 << 14)
def _owner(name: str, module_id: int) -> str | None:
    """The name of the installed package that the module ``name`` is part of, or ``""`` if the module is the user's.

    ``None`` if names in the module are never replaced, as in the standard library, torch and parwrap.
    """
    if name == "__main__":
        return ""  # it has no file in a notebook
    package = name.partition(".")[0]
    file = getattr(sys.modules.get(name), "__dict__", {}).get("__file__")
    if package in _NEVER or not isinstance(file, str):
        return None
    if is_installed(file):
        return package
    return None if is_standard(file) else ""


def _namespaces(names: Iterable[str]) -> list[dict[str, Any]]:
    return [vars(module) for name in names if isinstance(module := sys.modules.get(name), ModuleType)]


def _exchange(namespaces: Iterable[dict[str, Any]], instead: Mapping[int, Any]) -> None:
    for names in namespaces:
        _exchange_values(names, instead)
        for name, value in list(names.items()):
            if type(value) is dict and name != "__builtins__" and len(value) <= _MOST_NAMES:
                _exchange_values(value, instead)


def _exchange_values(names: dict[Any, Any], instead: Mapping[int, Any]) -> None:
    values = list(names.values())
    if not instead.keys().isdisjoint(map(id, values)):
        names.update({name: instead[id(value)] for name, value in names.items() if id(value) in instead})
    for value in values:
        if type(value) is functools.partial:
            _exchange_function(value, instead)


def _exchange_function(partial: functools.partial, instead: Mapping[int, Any]) -> None:
    if (function := instead.get(id(partial.func))) is not None:
        partial.__setstate__((function, partial.args, partial.keywords, vars(partial)))  # type: ignore[attr-defined]  # func is read-only


_loaded = _Loaded()
