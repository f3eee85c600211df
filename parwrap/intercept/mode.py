"""``module.train()`` and ``module.eval()``: call ``Interceptor.set_mode`` after the outermost call has taken effect.

``eval()`` is ``train(False)``, and ``train`` calls itself for every submodule; those inner calls are not forwarded.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from parwrap.intercept.interceptor import Interceptor
from parwrap.patching.patch import Patch

__all__ = ["patches"]


def patches(interceptor: Interceptor) -> list[Patch]:
    inside = False

    def train(wrapped: Callable, instance: nn.Module, args: tuple, kwargs: dict) -> nn.Module:
        nonlocal inside
        if inside:
            return wrapped(*args, **kwargs)
        inside = True
        try:
            result = wrapped(*args, **kwargs)
        finally:
            inside = False
        interceptor.set_mode(instance, instance.training)
        return result

    return [Patch(nn.Module, "train", train)]
