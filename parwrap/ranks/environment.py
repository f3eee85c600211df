"""Environment variables and attributes that are set inside a ``with`` block."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

__all__ = ["attribute", "environment", "without"]


@contextmanager
def environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set ``variables`` inside the block, and unset those with ``None``; afterwards they are as before.

    >>> with environment({"PARWRAP_EXAMPLE": "1"}):
    ...     os.environ["PARWRAP_EXAMPLE"]
    '1'
    >>> "PARWRAP_EXAMPLE" in os.environ
    False
    """
    before = {name: os.environ.get(name) for name in variables}
    _set(variables)
    try:
        yield
    finally:
        _set(before)


@contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set the attribute ``name`` of ``owner`` inside the block; afterwards it is as before."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def without(names: Iterable[str]) -> AbstractContextManager[None]:
    """Unset the variables ``names`` inside the block. Those that are set now are set again after it."""
    return environment({name: None for name in names if name in os.environ})


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
