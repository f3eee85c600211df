"""The base of the decorators that contribute an actor to what runs inside of them.

What the actor does with the verbs that it has methods for is its own. On one function and in one script, the scopes open in the
order of ``layer``, so that the actor of the highest is asked first, whatever order the user wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from parwrap.decorator import ScopeDecorator
from parwrap.verbs import acting

__all__ = ["ActingDecorator"]


class ActingDecorator(ScopeDecorator):
    """A decorator whose actor acts around those of lower layers, with or without ``distributed``."""

    def actor(self) -> Any:
        """A new actor, for one call."""
        raise NotImplementedError

    def scope(self, function: Callable | None) -> AbstractContextManager:
        return acting([self.actor()], getattr(function, "__module__", None))
