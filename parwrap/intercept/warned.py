"""The warnings of parwrap that are given inside a ``with`` block."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from parwrap.intercept.patch import Patch, installed

__all__ = ["parwraps_warnings"]

MARK = "parwrap:"
"""What each warning of parwrap begins with."""


@contextmanager
def parwraps_warnings() -> Iterator[list[str]]:
    """Yields a list that gets the text of each warning of parwrap, without ``MARK``, also of those that a filter hides."""
    given: list[str] = []

    def warn(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> None:
        text = str(args[0]) if args else ""
        if text.startswith(MARK):
            given.append(text.removeprefix(MARK).lstrip())
        wrapped(*args, **kwargs)

    with installed([Patch(warnings, "warn_explicit", warn)]):
        yield given
