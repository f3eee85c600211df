"""``ReduceLROnPlateau.step(metric)``: let ``Interceptor.metric`` choose the number that the schedule sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from parwrap.intercept.interceptor import Interceptor
from parwrap.patching.patch import Patch

__all__ = ["patches"]


def patches(interceptor: Interceptor) -> list[Patch]:
    def step(wrapped: Callable, instance: ReduceLROnPlateau, args: tuple, kwargs: dict) -> None:
        def with_metric(metrics: Any, *rest: Any, **options: Any) -> None:
            wrapped(interceptor.metric(metrics), *rest, **options)

        with_metric(*args, **kwargs)

    return [Patch(ReduceLROnPlateau, "step", step)]
