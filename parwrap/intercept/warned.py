"""The warnings of parwrap that are given inside a ``with`` block."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from parwrap.intercept.patch import Patch, installed
from parwrap.places import Place

__all__ = ["Warned", "parwraps_warnings"]

MARK = "parwrap:"
"""What each warning of parwrap begins with."""


class Warned(NamedTuple):
    """A warning: its text without ``MARK``, and its line."""

    text: str
    place: Place


@contextmanager
def parwraps_warnings() -> Iterator[list[Warned]]:
    """Yields a list that gets each warning of parwrap, also those that a filter hides."""
    given: list[Warned] = []

    def warn(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> None:
        text = str(args[0]) if args else ""
        if text.startswith(MARK):
            given.append(Warned(text.removeprefix(MARK).lstrip(), Place(*args[2:4])))
        wrapped(*args, **kwargs)

    with installed([Patch(warnings, "warn_explicit", warn)]):
        yield given
