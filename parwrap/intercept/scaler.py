"""A script's own ``GradScaler``: forward ``unscale_``, ``step`` and ``update`` to ``Interceptor.use_scaler``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from parwrap.coordination.call_site import is_ours
from parwrap.intercept.interceptor import Interceptor
from parwrap.patching.patch import Patch

__all__ = ["ScalerCall", "patches"]


class ScalerCall(NamedTuple):
    """One call of a method of a scaler.

    Attributes:
        scaler: the scaler.
        name: ``"unscale_"``, ``"step"`` or ``"update"``.
        optimizer: the optimizer of the gradients; ``None`` for ``update``.
        run: a function that runs torch's method.
    """

    scaler: torch.amp.GradScaler
    name: str
    optimizer: torch.optim.Optimizer | None
    run: Callable[[], Any]


def patches(interceptor: Interceptor) -> list[Patch]:
    """Forward only the script's own calls. Calls by torch and parwrap, such as ``unscale_`` from ``step``, run unchanged."""

    def patch(name: str, of_optimizer: bool) -> Patch:
        def call(wrapped: Callable, instance: torch.amp.GradScaler, args: tuple, kwargs: dict) -> Any:
            if is_ours(sys._getframe(1)):
                return wrapped(*args, **kwargs)
            optimizer = (args[0] if args else kwargs.get("optimizer")) if of_optimizer else None
            return interceptor.use_scaler(ScalerCall(instance, name, optimizer, partial(wrapped, *args, **kwargs)))

        return Patch(torch.amp.GradScaler, name, call)

    return [patch("unscale_", True), patch("step", True), patch("update", False)]
