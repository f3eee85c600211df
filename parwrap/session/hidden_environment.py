"""Hides the launch variables from a script, so that it looks as if it was not launched."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

__all__ = ["without_variables"]


@contextmanager
def without_variables(names: Iterable[str]) -> Iterator[None]:
    """``os.environ`` without the variables ``names``."""
    kept = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)
