"""Which saved objects are checkpoints: those that hold mostly weights and optimizers' state of the job (contract, rule 8)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

__all__ = ["is_checkpoint", "tensors_in"]

STREAM = torch.Generator().get_state().shape
"""The shape of the state of a random stream, in bytes: more than the weights of a small model."""


class Held(NamedTuple):
    """A tensor in an object.

    Attributes:
        name: the last part of its key, such as ``weight``.
        shape: its shape.
        place: where its values are in memory; ``None`` if that is not known.
        stream: whether it is the state of a random stream of torch.
    """

    name: str
    shape: tuple[int, ...]
    place: tuple[torch.device, int] | None = None
    stream: bool = False

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


def is_checkpoint(thing: Any, weights: Iterable[Any]) -> bool:
    """Whether more than half of the numbers in the tensors of ``thing`` belong to ``weights``, the modules and optimizers of the job.

    A tensor belongs to them if it has the memory of one of theirs, or its name and its shape. A cached sample has neither. States of random
    streams do not count.

    >>> model, copy = nn.Linear(3, 2), {"net.weight": torch.zeros(2, 3), "net.bias": torch.zeros(2)}
    >>> [is_checkpoint(each, [model]) for each in (model.state_dict(), {"epoch": 1, "model": copy}, {"x": torch.zeros(2, 3)}, [1], model)]
    [True, True, False, False, True]
    """
    saved = [each for each in tensors_in(thing) if each.numel and not each.stream]
    if not saved:
        return False
    places, names = set(), set()
    for held in tensors_in(list(weights)):
        places.add((held.place, held.numel))
        names.add((held.name, held.shape))
    ours = sum(each.numel for each in saved if (each.place and (each.place, each.numel) in places) or (each.name, each.shape) in names)
    return 2 * ours > sum(each.numel for each in saved)


def tensors_in(thing: Any) -> Iterator[Held]:
    """The tensors in ``thing``: in containers, modules, optimizers and the attributes of other objects, at any depth."""
    left: list[tuple[str, Any]] = [("", thing)]
    seen: dict[int, Any] = {}
    while left:
        name, each = left.pop()
        if isinstance(each, torch.Tensor):
            yield Held(name.rpartition(".")[2], tuple(each.shape), _place(each), each.dtype == torch.uint8 and each.shape == STREAM)
        elif (shape := _described(each)) is not None:
            yield Held(name.rpartition(".")[2], shape)
        elif isinstance(each, (str, bytes, int, float, complex, type, ModuleType)) or each is None or id(each) in seen:
            continue
        else:
            seen[id(each)] = each
            left += _parts(name, each)


def _parts(name: str, thing: Any) -> Iterable[tuple[str, Any]]:
    """What ``thing`` consists of, each part with its name."""
    if isinstance(thing, nn.Module):
        return chain(thing.named_parameters(), thing.named_buffers())
    if isinstance(thing, Optimizer):
        return [*_parts("", thing.state), *((name, p) for group in thing.param_groups for p in group["params"])]
    if isinstance(thing, Mapping):
        return [(key if isinstance(key, str) else name, value) for key, value in thing.items()]
    if isinstance(thing, (list, tuple, set, frozenset)):
        return [(name, value) for value in thing]
    return list(getattr(thing, "__dict__", {}).items())


def _described(thing: Any) -> tuple[int, ...] | None:
    """The shape of the tensor that ``thing`` describes for safetensors; ``None`` for other objects."""
    if isinstance(thing, Mapping):
        return tuple(thing["shape"]) if thing.keys() >= {"dtype", "shape", "data"} else None
    return tuple(thing.shape) if type(thing).__name__ == "TensorSpec" else None


def _place(tensor: torch.Tensor) -> tuple[torch.device, int] | None:
    try:
        pointer = tensor.data_ptr()
    except (RuntimeError, NotImplementedError):  # a sparse or a lazy one
        return None
    return (tensor.device, pointer) if pointer else None
