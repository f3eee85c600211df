"""The decorators as editors and type checkers see them: ``@f``, ``@f(option=value)`` and ``with f():``, with every option.

A type checker does not understand how :class:`ScopeDecorator` serves all three. Nothing here is imported when a program runs; a test
compares each signature with that of its class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal, Protocol, TypeVar, overload

import torch
import torch.distributed as dist

from parwrap.decorator import ScopeDecorator

F = TypeVar("F", bound=Callable[..., Any])


class WithoutOptions(Protocol):
    @overload
    def __call__(self, function: F, /) -> F: ...

    @overload
    def __call__(self) -> ScopeDecorator: ...


class Accumulate(Protocol):
    """Used with the number of steps: ``@accumulate(4)``."""

    def __call__(self, steps: int | Literal["auto"]) -> ScopeDecorator: ...


class Amp(Protocol):
    @overload
    def __call__(self, function: F, /) -> F: ...

    @overload
    def __call__(
        self,
        dtype: str | torch.dtype = "auto",
        level: str | None = None,
        *,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> ScopeDecorator: ...


class DataParallel(Protocol):
    @overload
    def __call__(self, function: F, /) -> F: ...

    @overload
    def __call__(
        self, *, device_ids: Sequence[int | str | torch.device] | None = None, gather: bool = True, loss: str | None = None
    ) -> ScopeDecorator: ...


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


class Evaluate(Protocol):
    @overload
    def __call__(self, function: F, /) -> F: ...

    @overload
    def __call__(self, *, reduce: Any = "mean", check: bool = True) -> ScopeDecorator: ...


class Hogwild(Protocol):
    @overload
    def __call__(self, function: F, /) -> F: ...

    @overload
    def __call__(
        self, *, workers: int | None = None, lock: bool = False, timeout: float | timedelta | None = None, seed: int | None = None
    ) -> ScopeDecorator: ...


class RankZeroFirst(Protocol):
    @overload
    def __call__(self, function: F, /) -> F: ...

    @overload
    def __call__(self, *, local: bool = False) -> ScopeDecorator: ...


class RankZeroOnly(Protocol):
    @overload
    def __call__(self, function: F, /) -> F: ...

    @overload
    def __call__(self, *, local: bool = False, broadcast: bool = False) -> ScopeDecorator: ...


class SyncBN(Protocol):
    @overload
    def __call__(self, function: F, /) -> F: ...

    @overload
    def __call__(self, *, process_group: dist.ProcessGroup | None = None, group_size: int | None = None) -> ScopeDecorator: ...


class UniformLength(Protocol):
    @overload
    def __call__(self, function: F, /) -> F: ...

    @overload
    def __call__(
        self, *, length: Any = None, pad_value: float | None = None, max_tokens: int | None = None, multiple_of: int = 1
    ) -> ScopeDecorator: ...
