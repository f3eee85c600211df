"""The table of functions that ``torch.jit.script`` knows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.jit import _builtins

__all__ = ["scripted_as"]


@contextmanager
def scripted_as(original: Callable, patched: Any) -> Iterator[None]:
    """Inside the block, scripted code may call ``patched`` as it may call ``original``. No public name can say so."""
    table = _builtins._get_builtin_table()
    if id(original) not in table:
        yield
        return
    table[id(patched)] = table[id(original)]
    try:
        yield
    finally:
        table.pop(id(patched), None)
