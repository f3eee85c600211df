"""Calls back when a module that is not imported yet is imported.

So parwrap itself never imports an optional package. The caller decides what to do with the module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["imports_watched"]


@contextmanager
def imports_watched(name: str, imported: Callable[[ModuleType], None]) -> Iterator[None]:
    """Inside the block, call ``imported`` with the module ``name`` as soon as it is loaded.

    >>> _ = sys.modules.pop("colorsys", None)
    >>> with imports_watched("colorsys", lambda module: print(module.__name__)):
    ...     import colorsys
    colorsys
    """
    finder: Any = _Finder(name, imported)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder:
    """Finds the module ``name`` through the entries of ``sys.meta_path`` after itself, and makes its loader call ``imported``."""

    def __init__(self, name: str, imported: Callable[[ModuleType], None]) -> None:
        self._name, self._imported = name, imported

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        after: list[Any] = sys.meta_path[sys.meta_path.index(self) + 1 :]
        spec = next((spec for finder in after if (spec := finder.find_spec(name, path, target))), None)
        if spec is not None and spec.loader is not None:
            self._watch(spec.loader)
        return spec

    def _watch(self, loader: Any) -> None:
        before, load = vars(loader).get("exec_module"), loader.exec_module

        def exec_module(module: ModuleType) -> None:
            if before is None:
                del loader.exec_module
            else:  # of another watcher of the same module
                loader.exec_module = before
            load(module)
            self._imported(module)

        loader.exec_module = exec_module
