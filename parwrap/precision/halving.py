"""Models that compute in float16 without autocast: Apex's levels O2 and O3.

A model is a module that is called from outside any other module and has a parameter of an optimizer. Its floating point inputs are cast to
float16 and its outputs to float32, so losses are computed in float32. What it writes into a dict, list or dataclass among its inputs is an
output too.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.optim import Optimizer

from parwrap.intercept.interceptor import Interceptor
from parwrap.loop.optimizers import parameters_of
from parwrap.ranks.structures import mapped
from parwrap.torch_private.autograd import in_backward
from parwrap.torch_private.modules import BatchNorm, registered_buffers
from parwrap.torch_private.tensors import version_of

__all__ = ["HalfForGood", "HalfInCalls"]

HALF = torch.float16

WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
"""Modules that wrap a model and call it."""


class _Halving(Interceptor):
    """Casts the inputs and outputs of models; a subclass says how the weights are cast.

    Args:
        optimizers: the optimizers that exist already.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._optimizers = weakref.WeakSet(optimizers)
        self._inside = False

    def built(self, optimizer: Optimizer) -> None:
        self._optimizers.add(optimizer)

    def copied(self, optimizer: Optimizer) -> None:
        self._optimizers.add(optimizer)

    def call(self, module: nn.Module, args: tuple, kwargs: dict, original: Callable) -> Any:
        """Run the call of ``module``, in float16 if ``module`` is a model."""
        if self._inside or isinstance(module, WRAPPERS) or not self._is_model(module):
            return original(*args, **kwargs)
        self._inside = True
        try:
            halves = _cast(args, HALF), _cast(kwargs, HALF)
            pairs = list(_pairs((args, kwargs), halves))
            outputs = self._run(module, *halves, original)
        finally:
            self._inside = False
        # a part of a model that a checkpoint recomputes, in a backward, is not called from outside
        dtype = None if in_backward() else torch.float32
        _put_back(pairs, dtype)
        return _cast(outputs, dtype)

    def _is_model(self, module: nn.Module) -> bool:
        if type(module).__module__.startswith("parwrap."):
            return False  # it holds parameters for a reducer
        owned = {id(p) for optimizer in self._optimizers for p in parameters_of(optimizer)}
        return any(id(p) in owned for p in module.parameters())

    def _run(self, module: nn.Module, args: tuple, kwargs: dict, run: Callable) -> Any:
        raise NotImplementedError


class HalfInCalls(_Halving):
    """O2: during a call of a model, its weights and buffers are float16 copies, except those of BatchNorm. The parameters stay float32.

    So optimizers, clipping and checkpoints see the master weights.
    """

    def _run(self, module: nn.Module, args: tuple, kwargs: dict, run: Callable) -> Any:
        kept = {id(t) for norm in module.modules() if isinstance(norm, BatchNorm) for t in (*norm.parameters(), *norm.buffers())}
        tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        halves: dict[int, torch.Tensor] = {}
        copies: dict[str, torch.Tensor] = {}
        for name, tensor in tensors:
            if tensor.is_floating_point() and id(tensor) not in kept:
                copies[name] = halves.setdefault(id(tensor), tensor.to(HALF))
        given = dict(copies)
        outputs = functional_call(module, copies, args, kwargs)  # leaves in ``copies`` what the forward has assigned
        for name, p in module.named_parameters(remove_duplicate=False):
            if name in given and given[name] is not p and version_of(given[name]):
                _take_over(p, given[name])
        for name, buffer in list(module.named_buffers(remove_duplicate=False)):
            if name in given and copies[name] is not given[name]:
                path, _, attribute = name.rpartition(".")
                registered_buffers(module.get_submodule(path))[attribute] = copies[name].to(buffer.dtype)
            elif name in given and version_of(given[name]):  # the call has changed it, like a moving average
                buffer.detach().copy_(given[name].detach())
        return outputs


class HalfForGood(_Halving):
    """O3: a model is cast to float16 at its first call: its parameters, its buffers and its optimizer's state."""

    def _is_model(self, module: nn.Module) -> bool:
        floating = [p.dtype for p in module.parameters() if p.is_floating_point()]
        return bool(floating) and (all(dtype is HALF for dtype in floating) or super()._is_model(module))

    def _run(self, module: nn.Module, args: tuple, kwargs: dict, run: Callable) -> Any:
        if any(p.dtype is not HALF for p in module.parameters() if p.is_floating_point()):
            module.to(HALF)
            for optimizer in self._optimizers:
                _cast_state(optimizer)
        return run(*args, **kwargs)


def _cast_state(optimizer: Optimizer) -> None:
    """Cast the state of float16 parameters to float16, as ``load_state_dict`` does; a rank may hold the state of only a part of them."""
    for p in parameters_of(optimizer):
        if p.dtype is HALF and (state := optimizer.state.get(p)):
            state.update({name: _cast(value, HALF) for name, value in state.items() if name != "step"})


@torch.no_grad()
def _take_over(p: torch.Tensor, half: torch.Tensor) -> None:
    """Copy back elements that a forward pass changed in the copy of a parameter, as an embedding with ``max_norm`` does."""
    p.copy_(torch.where(half == p.to(HALF), p, half.to(p.dtype)))


def _pairs(own: Any, copied: Any) -> Iterator[tuple[Any, Any]]:
    """Pairs of each object in ``own`` and the object at the same place in ``copied``; for dataclasses, also the dicts of attributes."""
    if dataclasses.is_dataclass(own) and not isinstance(own, (dict, type)):
        yield own, copied
        own, copied = getattr(own, "__dict__", {}), getattr(copied, "__dict__", {})
    yield own, copied
    if isinstance(own, (dict, list, tuple)):
        for key in own if isinstance(own, dict) else range(len(own)):
            yield from _pairs(own[key], copied[key])


def _put_back(pairs: list[tuple[Any, Any]], dtype: torch.dtype | None) -> None:
    """Write into the script's dicts and lists what a call has written into their copies, cast to ``dtype``."""
    originals = {id(copied): own for own, copied in pairs}

    def original(value: Any) -> Any:
        return originals[id(value)] if id(value) in originals else _cast(value, dtype)

    for own, copied in pairs:
        if isinstance(own, dict):
            for key in [key for key in own if key not in copied]:
                del own[key]
            for key, written in copied.items():
                value = original(written)
                if key not in own or own[key] is not value:  # some dicts refuse changes
                    own[key] = value
        elif isinstance(own, list) and [*map(id, own)] != [*map(id, now := [*map(original, copied)])]:
            own[:] = now


def _cast(values: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return values
    return mapped(values, lambda leaf: leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf)
