"""``torch.autograd.grad(outputs, inputs)``: pass the leaf tensors among its inputs to ``Interceptor.grad`` before it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from parwrap.intercept.interceptor import Interceptor
from parwrap.patching.patch import Patch

__all__ = ["patches"]


def patches(interceptor: Interceptor) -> list[Patch]:
    def grad(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
        if torch.compiler.is_compiling():  # torch.compile would trace into the interceptor
            return wrapped(*args, **kwargs)
        inputs = args[1] if len(args) > 1 else kwargs.get("inputs", ())
        # exactly these types, because tracing and functional transforms pass other tensor types through here
        if leaves := [each for each in _several(inputs) if type(each) in (torch.nn.Parameter, torch.Tensor) and each.is_leaf]:
            interceptor.grad(leaves)
        return wrapped(*args, **kwargs)

    return [Patch(torch.autograd, "grad", grad)]


def _several(inputs: Any) -> Any:
    """The tensors in an argument of torch, which may be one tensor, or a sequence or dict of tensors."""
    if isinstance(inputs, dict):
        return inputs.values()
    return inputs if isinstance(inputs, (tuple, list)) else (inputs,)
