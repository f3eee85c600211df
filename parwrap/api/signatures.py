"""The decorators as editors and type checkers see them: ``@f``, ``@f(option=value)`` and ``with f():``, with every option.

A type checker does not understand how :class:`ScopeDecorator` supports all three forms. Nothing here is imported when a program runs. The
options are those of each class's ``__init__``. Only those of ``distributed`` are repeated here, and a test compares them.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, overload

from parwrap.decorator import ScopeDecorator

P = ParamSpec("P")
F = TypeVar("F", bound=Callable[..., Any])


class Decorator(Protocol[P]):
    @overload
    def __call__(self, function: F, /) -> F: ...  # type: ignore[overload-overlap]  # no option of ours is a function

    @overload
    def __call__(self, *args: P.args, **options: P.kwargs) -> ScopeDecorator: ...


def decorator(init: Callable[Concatenate[Any, P], None]) -> Decorator[P]:
    """The type of a decorator whose class has this ``__init__``."""
    raise NotImplementedError


class Accumulate(Protocol):
    """Used with the number of steps: ``@accumulate(4)``."""

    def __call__(self, steps: int | Literal["auto"]) -> ScopeDecorator: ...


class Distributed(Protocol):
    @overload
    def __call__(self, function: F, /) -> F: ...

    @overload
    def __call__(
        self,
        *,
        backend: str | None = None,
        seed: int | None = None,
        batch: str = "per_rank",
        uneven: str = "pad",
        lr: str = "keep",
        loss: str = "mean",
        strategy: str = "ddp",
        bucket_cap_mb: float = 25,
        timeout: float | timedelta | None = None,
        gradient_as_bucket_view: bool = False,
        compress: str | None = None,
        powersgd_rank: int = 4,
        every: int = 8,
        warmup: int = 0,
        outer: str | None = None,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        lock: bool = False,
        servers: int = 1,
        staleness: int | None = None,
        survive: bool = False,
        hang_after: float = 60,
        wrap: int | str | type | tuple[str | type, ...] | None = None,
        nprocs: int | str | None = None,
        returns: str = "rank0",
        start_method: str | None = None,
    ) -> ScopeDecorator: ...
