"""The modules of the script: those that exist when a scope opens, and those whose mode it sets. They name parameters in errors."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import nn

from parwrap.intercept.interceptor import Interceptor

__all__ = ["Modules"]


class Modules(Interceptor):
    """Outer modules of the script.

    Args:
        modules: the modules that exist when the scope opens.

    >>> model = nn.Sequential(nn.Linear(3, 2))
    >>> Modules([model]).name_of(model[0].bias), Modules([]).name_of(model[0].bias)
    ('0.bias', 'a parameter of shape (2,)')
    """

    def __init__(self, modules: Iterable[nn.Module] = ()) -> None:
        self.first = list(modules)
        self._known: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary(dict.fromkeys(self.first))

    def set_mode(self, module: nn.Module, training: bool) -> None:
        self._known.setdefault(module)

    def name_of(self, parameter: torch.Tensor) -> str:
        """The name of ``parameter`` in the module that has it, or its shape."""
        names = [name for module in list(self._known) for name, each in module.named_parameters() if each is parameter]
        return max(names, key=len, default=f"a parameter of shape {tuple(parameter.shape)}")
