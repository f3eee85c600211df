"""The modules of the script: those that exist when a scope opens, those that it builds outside of training passes, and their parameters."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from itertools import chain
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from parwrap.intercept.interceptor import Interceptor
from parwrap.loop.passes import Passes
from parwrap.places import Place, script_place
from parwrap.ranks.group import is_on_one_rank
from parwrap.torch_private.modules import registered_parameters

__all__ = ["Modules", "has_values"]


BARE = 1 << 40
"""The number of the first tensor that is no parameter of a module."""


def has_values(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` has numbers: a lazy one has none yet, and one on the meta device never.

    >>> has_values(torch.ones(1)), has_values(torch.ones(1, device="meta")), has_values(nn.LazyLinear(1).weight)
    (True, False, False)
    """
    return not is_lazy(tensor) and not tensor.is_meta


class _Eval(NamedTuple):
    """The last call of ``eval`` on a module: how many calls on all modules there had been then, and its line."""

    number: int = 0
    place: Place | None = None


class Modules(Interceptor):
    """The modules of the script.

    Args:
        passes: the passes over loaders: what is built inside a training pass belongs to its batch.
        modules: the modules that exist when the scope opens.

    Attributes:
        first: the modules that existed when the scope opened.
        count: the number of parameters that were made outside training passes, the same on all ranks.
        order_differs: whether optimizers have their parameters in another order on some rank.
    """

    def __init__(self, passes: Passes, modules: Iterable[nn.Module] = ()) -> None:
        self._passes, self.first = passes, list(modules)
        self._outer: weakref.WeakKeyDictionary[nn.Module, _Eval] = weakref.WeakKeyDictionary(dict.fromkeys(self.first, _Eval()))
        self._numbers: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._holders: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()
        self._homes: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._bare: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self.count = 0
        self.order_differs = False
        for module in self.first:
            for parameter in module.parameters():
                self._note(parameter)
        self._hook = register_module_parameter_registration_hook(self._registered)

    def _registered(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not self._passes.training and not is_on_one_rank():
            self._note(parameter)
            self._holders.setdefault(module)
            self._homes[parameter] = f"{name} of a {type(module).__name__}", weakref.ref(module)

    def _note(self, parameter: torch.Tensor) -> None:
        if parameter not in self._numbers:
            self._numbers[parameter] = self.count
            self.count += 1

    def all(self) -> list[nn.Module]:
        """The modules of the script that are known; a module may be listed beside the one that contains it."""
        return [*self._outer, *self._holders]

    def trainable(self, leaves_out: Callable[[torch.Tensor], bool]) -> dict[int, torch.Tensor]:
        """The parameters of :meth:`numbered` that require grad and have values, except those for which ``leaves_out`` returns true."""
        return {number: p for number, p in self.numbered().items() if not leaves_out(p) and p.requires_grad and has_values(p)}

    def frozen(self) -> list[int]:
        """The numbers of the parameters that do not require grad."""
        return [number for number, p in self.numbered().items() if not p.requires_grad]

    def numbered(self) -> dict[int, torch.Tensor]:
        """The parameters that were made outside training passes, by their number in the order of making, which is the same on all ranks."""
        return {number: p for p, number in self._numbers.items()}

    def reached(self, leaves: Iterable[torch.Tensor]) -> None:
        """Number the bare tensors among ``leaves``, which are in the order of a graph: it is the same on all ranks."""
        for leaf in leaves:
            if leaf not in self._numbers and leaf not in self._bare:
                self._bare[leaf] = BARE + len(self._bare)

    def numbers_of(self, parameters: Iterable[torch.Tensor]) -> list[float]:
        """A number for each parameter, the same on all ranks; infinity where none is known."""
        return [self._numbers.get(p, self._bare.get(p, math.inf)) for p in parameters]

    def in_order(self, parameters: list[torch.Tensor], always: bool = False) -> list[torch.Tensor]:
        """``parameters`` in an order that all ranks have, if theirs differs, as that of a ``set`` does, or ``always``."""
        if not (always or self.order_differs):
            return parameters
        numbers = self.numbers_of(parameters)
        return [parameters[place] for place in sorted(range(len(numbers)), key=numbers.__getitem__)]

    def set_mode(self, module: nn.Module, training: bool) -> None:
        self._outer.setdefault(module, _Eval())
        if is_on_one_rank():  # what one rank does to a model must not change what the next pass is on that rank
            return
        self._passes.modes += 1
        if not training:
            self._passes.evals += 1
            self._outer[module] = _Eval(self._passes.evals, script_place())

    def copied_module(self, module: nn.Module) -> None:
        if not self._passes.training and not is_on_one_rank():
            self._holders.setdefault(module)

    def evaluates(self, parameters: Iterable[torch.Tensor], since: int = -1) -> bool:
        """Whether the modules of all trainable ``parameters`` are in eval mode, one of them since more than ``since`` calls of eval.

        Args:
            parameters: parameters. A frozen ``bn.eval()`` is not enough to put a model in eval mode.
            since: an earlier value of ``Passes.evals``.
        """
        trainable = {id(p) for p in parameters if p.requires_grad}
        in_eval, training, freshly = set[int](), set[int](), set[int]()
        known = [*list(self._outer.items()), *((module, _Eval()) for module in list(self._holders))]
        for outer, last in known:
            for module in outer.modules():
                held = trainable.intersection(map(id, registered_parameters(module).values()))
                (training if module.training else in_eval).update(held)
                if last.number > since:
                    freshly |= held
        return bool(freshly) and in_eval - training == trainable

    def eval_place(self, parameters: Iterable[torch.Tensor]) -> Place | None:
        """The line that put a module of ``parameters`` in eval mode last; ``None`` if none did."""
        ids = set(map(id, parameters))
        lasts = [last for outer, last in list(self._outer.items()) if not ids.isdisjoint(map(id, outer.parameters()))]
        return max(lasts, key=lambda last: last.number, default=_Eval()).place

    def moved(self, module: nn.Module) -> None:
        """Note the parameters that ``module`` has got: ``to_empty`` replaces those of the meta device without registering them."""
        if not self._passes.training and not is_on_one_rank():
            for parameter in module.parameters():
                self._note(parameter)

    def name_of(self, parameter: torch.Tensor) -> str:
        """The longest name under which a module of the script holds ``parameter``, else the name in its own module; with its shape."""
        names = [name for module in list(self._outer) for name, each in module.named_parameters() if each is parameter]
        name = max(names, key=len, default=self._homes.get(parameter, ("a parameter",))[0])
        return f"{name} (shape {tuple(parameter.shape)})" if has_values(parameter) else name

    def renormed(self, parameter: torch.Tensor) -> str:
        """What an error says about a ``parameter`` whose module has a ``max_norm``; empty if it has none.

        Such a forward scales the rows that it looks up in place, and each rank looks up others.
        """
        home = self._homes[parameter][1]() if parameter in self._homes else None
        modules = chain([home], *(module.modules() for module in list(self._outer)))
        owners = (each for each in modules if each is not None and any(own is parameter for own in each.parameters(recurse=False)))
        for each in owners:
            if (norm := getattr(each, "max_norm", None)) is not None:
                return (
                    f"each forward of {type(each).__name__}(max_norm={norm}) scales the rows that it looks up in place, and each rank "
                    "looks up others. Build it without max_norm, and scale all rows before the loop and after each step: `with "
                    f"torch.no_grad(): embedding.weight.renorm_({getattr(each, 'norm_type', 2.0):g}, 0, {norm:g})`"
                )
        return ""

    def close(self) -> None:
        """Remove the hook that notes new parameters."""
        self._hook.remove()
