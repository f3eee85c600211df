"""``torch.manual_seed``: forward each call to ``Interceptor.seeded``, once it has seeded.

numpy and python have seeds of their own, which do not count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from parwrap.intercept.interceptor import Interceptor
from parwrap.patching.patch import Patch

__all__ = ["patches"]


def patches(interceptor: Interceptor) -> list[Patch]:
    def manual_seed(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> torch.Generator:
        generator = wrapped(*args, **kwargs)
        interceptor.seeded()
        return generator

    return [Patch(torch, "manual_seed", manual_seed)]
