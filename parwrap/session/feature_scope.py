"""The base class of the decorators that install an interceptor while the function runs.

Each interceptor has a file of its own. On one function and in one script, the scopes open in the order of ``layer``, in whatever order you
wrote them. The interceptor of the highest layer is called first. This file defines what happens when a scope opens inside another of the
same kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from parwrap.decorator import ScopeDecorator, module_of
from parwrap.intercept.interceptor import Interceptor
from parwrap.intercept.table import intercepting

__all__ = ["FeatureDecorator", "batches_per_step", "described"]

_open: list[FeatureDecorator] = []
"""Open scopes of all kinds, the innermost last."""


class FeatureDecorator(ScopeDecorator):
    """A decorator whose interceptor is installed around those of lower layers, with or without ``distributed``.

    Inside another scope of the same kind, it has no effect if both have the same options, or if it has none.

    Attributes:
        batches_per_step: the number of batches per optimizer step.
    """

    batches_per_step = 1

    def interceptor(self) -> Interceptor:
        """A new interceptor, for one call."""
        raise NotImplementedError

    def asked(self) -> Any:
        """The options in a form that can be compared; ``None`` if there are none."""
        raise NotImplementedError

    def described(self) -> str:
        """What it does, for the line at the start of training."""
        return type(self).__name__

    def check_within(self, around: FeatureDecorator) -> None:
        """Raise :class:`UsageError` if it cannot open inside ``around``, whose options differ."""

    def opened(self, module: str | None) -> AbstractContextManager:
        """The scope of a function of ``module``, if it is not open yet."""
        return intercepting([self.interceptor()], module)

    @contextmanager
    def scope(self, function: Callable | None) -> Iterator[None]:
        around = next((each for each in reversed(_open) if isinstance(each, type(self))), None)
        if around is not None:
            if self.asked() in (None, around.asked()):
                yield
                return
            self.check_within(around)
        _open.append(self)
        try:
            with self.opened(module_of(function)):
                yield
        finally:
            _open.pop()


def described() -> list[str]:
    """The open scopes, for the line at the start of training."""
    return list(dict.fromkeys(each.described() for each in _open))


def batches_per_step() -> int:
    """The number of batches per optimizer step in the open scopes."""
    return math.prod(each.batches_per_step for each in _open)
