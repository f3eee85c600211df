"""Replicas of a module on several devices: the module itself on the first, and copies whose gradients flow back to its parameters.

Changes that a forward makes in a copy are lost; changes in the first replica, such as the running statistics of a BatchNorm, are the
module's own. Torch's own ``replicate`` supports only different GPUs, and gives unused parameters a gradient of zeros.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn

from parwrap.torch_private.data_parallel import IS_REPLICA, shallow_replica, unsafe_view
from parwrap.torch_private.modules import FLAT_WEIGHTS, registered_buffers, registered_modules, registered_parameters

__all__ = ["replicas"]

SMALL = 2**18
"""Tensors up to this number of elements are sent together, because each copy to another device has a fixed cost."""


def replicas(module: nn.Module, devices: Sequence[torch.device]) -> list[nn.Module]:
    """``module``, whose parameters and buffers are on the first of ``devices``, and a copy of it for each of the others.

    >>> layer = nn.Linear(1, 1)
    >>> one, other = replicas(layer, [torch.device("cpu")] * 2)
    >>> one is layer, other.weight is layer.weight, torch.equal(other.weight, layer.weight)
    (True, False, True)
    """
    held = [registry(each) for each in module.modules() for registry in (registered_parameters, registered_buffers)]
    tensors = {id(t): t for each in held for t in each.values() if t is not None}
    flows = [t for t in tensors.values() if t.requires_grad and torch.is_grad_enabled()]
    stays = [t for t in tensors.values() if not (t.requires_grad and torch.is_grad_enabled())]
    given = [*flows, *stays]
    with torch.no_grad():
        still = _sent(stays, devices[1:])
    flowing = _Copies.apply(devices[1:], *flows)
    copies = [[*flowing[number * len(flows) : (number + 1) * len(flows)], *each] for number, each in enumerate(still)]
    return [module, *(_copy(module, _by_id(given, each), device) for each, device in zip(copies, devices[1:], strict=True))]


class _Copies(torch.autograd.Function):
    """Copies of tensors on each of several devices, one device after the other. A tensor whose copies get no gradient gets none."""

    @staticmethod
    def forward(ctx: Any, devices: Sequence[torch.device], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.homes = [t.device for t in tensors]
        return tuple(copy for each in _sent(tensors, devices) for copy in each)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        count = len(ctx.homes)
        sums: list[torch.Tensor | None] = [None] * count
        for first in range(0, len(grads), count or 1):
            there = {place: grad for place, grad in enumerate(grads[first : first + count]) if grad is not None}
            (back,) = _sent(list(there.values()), [ctx.homes[0]], copying=False)
            for place, grad in zip(there, back, strict=True):
                known = sums[place]
                sums[place] = grad if known is None else known + grad
        return (None, *sums)


def _sent(tensors: Sequence[torch.Tensor], devices: Sequence[torch.device], copying: bool = True) -> list[list[torch.Tensor]]:
    """``tensors`` on each of ``devices``.

    Without ``copying``, a large tensor that is already on a device is returned itself; small ones are always packed together.
    """
    together: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(tensors):
        if tensor.numel() <= SMALL and tensor.layout is torch.strided and type(tensor) in (torch.Tensor, nn.Parameter):
            together.setdefault(tensor.dtype, []).append(place)
    flat = {dtype: torch.cat([tensors[place].reshape(-1) for place in places]) for dtype, places in together.items()}
    sent = []
    for device in devices:
        there: dict[int, torch.Tensor] = {}
        for dtype, places in together.items():
            # not views: an in-place change of one piece must not invalidate another that is saved for a backward
            pieces = torch.unsafe_split_with_sizes(flat[dtype].to(device, copy=copying), [tensors[place].numel() for place in places])
            there |= {place: unsafe_view(piece, tensors[place].shape) for place, piece in zip(places, pieces, strict=True)}
        sent.append([there[place] if place in there else t.to(device, copy=copying) for place, t in enumerate(tensors)])
    return sent


def _by_id(tensors: list[torch.Tensor], copies: list[torch.Tensor]) -> dict[int, Any]:
    return {id(tensor): copy for tensor, copy in zip(tensors, copies, strict=True)}


def _copy(module: nn.Module, known: dict[int, Any], device: torch.device) -> nn.Module:
    """A copy of ``module`` and its submodules; ``known`` has the copied tensors by the ids of their originals."""
    pairs = [(each, shallow_replica(each)) for each in module.modules()]
    known |= {id(each): own for each, own in pairs}
    for each, own in pairs:
        vars(own).update({name: _exchanged(value, known, device) for name, value in vars(each).items() if name not in _OWN})
        registered_modules(own).update({name: known.get(id(child)) for name, child in registered_modules(each).items()})
        registered_buffers(own).update({name: known.get(id(buffer)) for name, buffer in registered_buffers(each).items()})
        for name, p in registered_parameters(each).items():
            if p is not None:
                setattr(own, name, known[id(p)])  # because recurrent layers also keep it in a separate list
                vars(own).pop(name, None)
            registered_parameters(own)[name] = known.get(id(p))
    return pairs[0][1]


_OWN = {*vars(nn.Module()), IS_REPLICA, FLAT_WEIGHTS}
"""Attributes that a copy gets in another way, or shares with the original."""


def _exchanged(value: Any, known: dict[int, Any], device: torch.device) -> Any:
    """The value of an attribute in a copy: references to the original's modules and tensors become references to the copy's."""
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, torch.Tensor):
        return value.to(device, copy=True)
    if isinstance(value, MethodType) and id(value.__self__) in known:
        return MethodType(value.__func__, weakref.proxy(known[id(value.__self__)]))  # a cycle would keep the copy alive
    if type(value) is tuple:
        return tuple(_exchanged(each, known, device) for each in value)
    if type(value) in (list, deque, dict, OrderedDict, defaultdict, set):
        own = copy.copy(value)
        for place, each in value.items() if isinstance(value, dict) else () if isinstance(value, set) else enumerate(value):
            own[place] = _exchanged(each, known, device)
        return own
    return value
