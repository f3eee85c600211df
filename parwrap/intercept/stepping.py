"""Every ``optimizer.step()`` that is not skipped: call ``Interceptor.takes_step`` before it, and ``took_step`` after it.

A skipped step does not count, and one that a class forwards to its base class counts once.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from parwrap.intercept.interceptor import Interceptor
from parwrap.intercept.optimizer import hooked
from parwrap.intercept.skipping import handed_on, is_image

__all__ = ["takes_patches", "took_patches"]


def takes_patches(interceptor: Interceptor) -> list[AbstractContextManager]:
    def takes(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        if not (is_image(args[0]) or handed_on(optimizer)):
            interceptor.takes_step(optimizer)

    return [hooked(takes)]


def took_patches(interceptor: Interceptor) -> list[AbstractContextManager]:
    def took(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        if not (is_image(args[0]) or handed_on(optimizer)):
            interceptor.took_step(optimizer)

    return [hooked(took, register_optimizer_step_post_hook)]
