"""The modules of the script: those that exist when a scope opens, those that it builds outside of training passes, and their parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from parwrap.intercept.interceptor import Interceptor
from parwrap.loop.passes import Passes
from parwrap.ranks.group import is_on_one_rank

__all__ = ["Modules"]


class Modules(Interceptor):
    """The modules of the script.

    Args:
        passes: the passes over loaders: what is built inside a training pass belongs to its batch.
        modules: the modules that exist when the scope opens.

    Attributes:
        first: the modules that existed when the scope opened.
        count: the number of parameters that were made outside training passes, the same on all ranks.
    """

    def __init__(self, passes: Passes, modules: Iterable[nn.Module] = ()) -> None:
        self._passes, self.first = passes, list(modules)
        self._outer: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary(dict.fromkeys(self.first))
        self._numbers: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._homes: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self.count = 0
        for module in self.first:
            for parameter in module.parameters():
                self._note(parameter)
        self._hook = register_module_parameter_registration_hook(self._registered)

    def _registered(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not self._passes.training and not is_on_one_rank():
            self._note(parameter)
            self._homes[parameter] = f"{name} of a {type(module).__name__}"

    def _note(self, parameter: torch.Tensor) -> None:
        if parameter not in self._numbers:
            self._numbers[parameter] = self.count
            self.count += 1

    def trainable(self, leaves_out: Callable[[torch.Tensor], bool]) -> dict[int, torch.Tensor]:
        """The parameters of :meth:`numbered` that require grad, except lazy ones and those for which ``leaves_out`` returns true."""
        return {number: p for number, p in self.numbered().items() if not leaves_out(p) and p.requires_grad and not is_lazy(p)}

    def frozen(self) -> list[int]:
        """The numbers of the parameters that do not require grad."""
        return [number for number, p in self.numbered().items() if not p.requires_grad]

    def numbered(self) -> dict[int, torch.Tensor]:
        """The parameters that were made outside training passes, by their number in the order of making, which is the same on all ranks."""
        return {number: p for p, number in self._numbers.items()}

    def set_mode(self, module: nn.Module, training: bool) -> None:
        self._outer.setdefault(module)

    def name_of(self, parameter: torch.Tensor) -> str:
        """The longest name under which a module of the script holds ``parameter``, else the name in its own module; with its shape."""
        names = [name for module in list(self._outer) for name, each in module.named_parameters() if each is parameter]
        name = max(names, key=len, default=self._homes.get(parameter, "a parameter"))
        return f"{name} (shape {tuple(parameter.shape)})"

    def close(self) -> None:
        """Remove the hook that notes new parameters."""
        self._hook.remove()
