"""The decorators as editors and type checkers see them: ``@f``, ``@f(option=value)`` and ``with f():``, with every option.

A type checker does not understand how :class:`ScopeDecorator` supports all three forms. Nothing here is imported when a program runs. The
options are those of each class's ``__init__``, and for ``distributed`` those of the dataclass ``Options``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from parwrap.decorators.scope import ScopeDecorator

P = ParamSpec("P")
F = TypeVar("F", bound=Callable[..., Any])


class Decorator(Protocol[P]):
    """A decorator, called with the function to decorate or with options."""

    @overload
    def __call__(self, function: F, /) -> F: ...  # type: ignore[overload-overlap]  # no option of ours is a function

    @overload
    def __call__(self, *args: P.args, **options: P.kwargs) -> ScopeDecorator: ...


def decorator(init: Callable[Concatenate[Any, P], None]) -> Decorator[P]:
    """The type of a decorator with the options that this ``__init__`` takes."""
    raise NotImplementedError


class Accumulate(Protocol):
    """The decorator ``accumulate``, which always takes the number of steps: ``@accumulate(4)``."""

    def __call__(self, steps: int) -> ScopeDecorator: ...
