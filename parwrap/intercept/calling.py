"""``module(...)``: forward the call to ``Interceptor.call``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from parwrap.intercept.interceptor import Interceptor
from parwrap.patching.patch import Patch
from parwrap.torch_private.modules import CALL

__all__ = ["patches"]


def patches(interceptor: Interceptor) -> list[Patch]:
    def call(wrapped: Callable, instance: nn.Module, args: tuple, kwargs: dict) -> Any:
        if torch.compiler.is_compiling():  # torch.compile would trace into the interceptor
            return wrapped(*args, **kwargs)
        return interceptor.call(instance, args, kwargs, wrapped)

    # this is what __call__ calls; torch.fx temporarily replaces __call__, and would not restore a patch of it
    return [Patch(nn.Module, CALL, call)]
