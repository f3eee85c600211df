"""Random draws of torch, numpy and python: forward each to ``Interceptor.draw``.

It intercepts the functions of the global generators, under any name that a script uses. It does not intercept libraries that use the
generators directly (scikit-learn holds numpy's global generator itself).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from parwrap.intercept.interceptor import Interceptor
from parwrap.patching.patch import Patch

__all__ = ["patches"]

_TORCH = {
    torch: "rand randn randint randperm rand_like randn_like randint_like normal bernoulli multinomial poisson",
    torch.Tensor: "uniform_ normal_ random_ bernoulli_ exponential_ geometric_ log_normal_ cauchy_ bernoulli multinomial",
    functional: "dropout alpha_dropout feature_alpha_dropout dropout1d dropout2d dropout3d rrelu",
}
_STATES = ("seed", "get_state", "set_state", "getstate", "setstate", "get_bit_generator", "set_bit_generator")


def patches(interceptor: Interceptor) -> list[Patch]:
    def patch(owner: Any, name: str, library: str) -> Patch:
        def draw(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> Any:
            if torch.compiler.is_compiling():  # torch.compile would trace into the interceptor
                return wrapped(*args, **kwargs)
            return interceptor.draw(library, name, wrapped, args, kwargs)

        return Patch(owner, name, draw)

    drawn_by_torch = [patch(owner, name, "torch") for owner, names in _TORCH.items() for name in names.split()]
    drawn_by_others = [patch(module, name, module.__name__) for module in (np.random, random) for name in _methods(module)]
    return [*drawn_by_torch, *drawn_by_others]


def _methods(module: ModuleType) -> list[str]:
    """The functions of ``module`` that are methods of its global generator and draw from it."""
    generator = getattr(module.random, "__self__", None)
    return [name for name, each in vars(module).items() if getattr(each, "__self__", None) is generator and name not in _STATES]
