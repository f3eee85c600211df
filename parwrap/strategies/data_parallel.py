"""One process, several devices: the call of a model is cut along dimension 0, runs on a replica on each device, and is merged.

This is what ``torch.nn.DataParallel`` does, without a wrapper. ``replicas.py`` makes and runs replicas, ``pieces.py`` represents outputs
that stay on their devices. A call that cannot be cut runs whole on the first device, with a warning.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence

from parwrap.errors import UsageError
from parwrap.intercept.interceptor import Interceptor
from parwrap.places import script_place, warn
from parwrap.ranks import group as groups
from parwrap.ranks.group import say
from parwrap.ranks.structures import mapped
from parwrap.strategies.pieces import Pieces, in_whole, whole
from parwrap.strategies.replicas import is_undivided, replicas, run_together, undivided
from parwrap.torch_private.autograd import current_transform, in_backward, tracing_state
from parwrap.torch_private.modules import IS_REPLICA, ORIGINAL_MODULE, compiled_call, registered_modules

__all__ = ["DataParallel", "refuse_ranks"]


class DataParallel(Interceptor):
    """Divides the calls of models over devices.

    Args:
        devices: the devices of the replicas; the model is on the first. With a single device, calls run unchanged.
        gather: whether outputs with rows are gathered on the first device; otherwise these stay on their devices, as :class:`Pieces`.
        loss: how a number that a model returns combines the samples: ``"mean"`` or ``"sum"``; ``None`` if it returns no such number.
        named: whether the user named the devices; then calls on several ranks are an error, unless there is only one device.
    """

    def __init__(self, devices: Sequence[torch.device], gather: bool, loss: str | None, named: bool) -> None:
        self._devices, self._gather, self._loss, self._named = devices, gather, loss, named
        self._said: set[tuple[str, str]] = set()

    def call(self, module: nn.Module, args: tuple, kwargs: dict, original: Callable) -> Any:
        """Run a call of ``module``: on several devices if the script itself calls it, it has parameters, and the call can be divided."""
        if is_undivided() or _is_internal(module):
            return original(*args, **kwargs)
        if next(module.parameters(), None) is None:
            plain = type(module).__module__.startswith("torch.nn.") and compiled_call(module) is None
            return original(*args, **kwargs) if plain else self._on_whole(original, args, kwargs)  # torch's modules take pieces
        with undivided():
            if isinstance(module, (nn.DataParallel, DistributedDataParallel)):  # the script deals with devices itself
                return original(*args, **kwargs)
            return self._call(module, args, kwargs, original)

    def _call(self, module: nn.Module, args: tuple, kwargs: dict, original: Callable) -> Any:
        if groups.current() is not None:
            if self._named and len(self._devices) > 1:
                raise refuse_ranks(self._devices, groups.world_size())
            return original(*args, **kwargs)
        if len(self._devices) < 2 or any(is_lazy(p) for p in module.parameters()):  # the first batch sets the shapes
            return self._on_whole(original, args, kwargs)
        self._check_device(module)
        rows = next((leaf.size(0) for leaf in _leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.dim()), 0)
        sizes = sizes_of(rows, len(self._devices))
        if len(sizes) < 2:
            return self._on_whole(original, args, kwargs)
        reason = _why_whole(module, (*args, *kwargs.values()), rows)
        if reason is not None:
            self._warn_of_whole(module, reason)
            return self._on_whole(original, args, kwargs)
        return self._divided(module, args, kwargs, original, sizes)

    def _divided(self, module: nn.Module, args: tuple, kwargs: dict, original: Callable, sizes: list[int]) -> Any:
        devices = self._devices[: len(sizes)]
        _say_division(type(module).__name__, tuple(self._devices))
        copies = replicas(module, devices)
        calls = []
        for number, replica in enumerate(copies):
            own, named = _over([(args, kwargs)], functools.partial(_cut, sizes=sizes, devices=devices, number=number))
            calls.append(functools.partial(original if replica is module else replica, *own, **named))
        merge = functools.partial(_merged, sizes=sizes, loss=self._loss, join=in_whole if self._gather else Pieces)
        try:
            return _over(run_together(devices, calls, copies), merge)
        except _Unmergeable as problem:
            raise UsageError(f"{script_place()} calls {type(module).__name__}, which returned {problem}") from None

    def _on_whole(self, original: Callable, args: tuple, kwargs: dict) -> Any:
        if not self._gather:
            args, kwargs = mapped((args, kwargs), whole)
        return original(*args, **kwargs)

    def _check_device(self, module: nn.Module) -> None:
        first = self._devices[0]
        for tensor in chain(module.parameters(), module.buffers()):
            if tensor.device != first:
                raise UsageError(
                    f"{script_place()} calls {type(module).__name__}, which has a tensor on {tensor.device}, but the model must be on the "
                    f"first device of parwrap.data_parallel, {first}: move it there with model.to('{first}'), or choose other device_ids."
                )

    def _warn_of_whole(self, module: nn.Module, reason: str) -> None:
        name = type(module).__name__
        if (name, reason) not in self._said:
            self._said.add((name, reason))
            warn(
                f"parwrap: {name} runs on {self._devices[0]} alone, because parwrap.data_parallel cannot divide it: {reason}. The result "
                "is right, but no faster than on one device."
            )


@functools.cache
def _say_division(model: str, devices: Sequence[torch.device]) -> None:
    """Print that the batches of a model are divided, once for each model class and list of devices."""
    say(f"1 process on {', '.join(map(str, devices))}: each batch of {model} is divided")


def refuse_ranks(devices: Sequence[torch.device], ranks: int) -> UsageError:
    """The error for a script that names several devices while several ranks run, each with one device."""
    return UsageError(
        f"parwrap.data_parallel({[str(device) for device in devices]}) is for one process, but there are {ranks} ranks, each with one "
        "device. Remove the devices (without them, parwrap.data_parallel has no effect on several ranks), or run one rank."
    )


# which calls are divided


def _is_internal(module: nn.Module) -> bool:
    """Whether a call belongs to a replica of ``nn.DataParallel``, or to a model that torch recomputes, traces or transforms."""
    return getattr(module, IS_REPLICA, False) or in_backward() or tracing_state() is not None or current_transform() is not None


def _why_whole(module: nn.Module, given: Sequence[Any], rows: int) -> str | None:
    """Why a call of ``module`` with these arguments, a batch of ``rows`` samples, cannot be divided; ``None`` if it can."""
    if _is_compiled(module):
        return "the model, or a part of it, is compiled"
    for leaf in _leaves(given):
        if isinstance(leaf, torch.Tensor):
            if leaf.layout is not torch.strided or leaf.is_nested:
                return "one of its inputs is a sparse or nested tensor"
            if leaf.dim() and leaf.size(0) not in (1, rows):
                return f"its inputs have {rows} and {leaf.size(0)} rows, so the number of samples is unclear"
        elif isinstance(leaf, PackedSequence) or _has_tensors(list(getattr(leaf, "__dict__", {}).values())):
            return f"one of its inputs is a {type(leaf).__name__}, which contains tensors"
    if any(_has_items(value, rows) for value in given):
        return f"one of its inputs is a list or an array of {rows} items for {rows} samples, which may be one for each sample"
    return None


def _has_items(value: Any, rows: int) -> bool:
    """Whether ``value`` is or contains an array, or a list without tensors, of ``rows`` items."""
    if isinstance(value, MutableMapping):
        return any(_has_items(each, rows) for each in value.values())
    if isinstance(value, (list, tuple)):
        return (len(value) == rows and not _has_tensors(value)) or any(_has_items(each, rows) for each in value)
    return not isinstance(value, torch.Tensor) and tuple(getattr(value, "shape", ()))[:1] == (rows,)


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in _leaves(value))


def _is_compiled(module: nn.Module) -> bool:
    """Whether ``module`` or a module inside it is compiled: a copy of compiled code would run the original."""
    return any(
        isinstance(each, torch.jit.ScriptModule) or compiled_call(each) is not None or ORIGINAL_MODULE in registered_modules(each)
        for each in module.modules()
    )


def sizes_of(rows: int, parts: int) -> list[int]:
    """How many of ``rows`` samples each of at most ``parts`` parts gets; no part is empty.

    >>> sizes_of(5, 3), sizes_of(2, 3)
    ([2, 2, 1], [1, 1])
    """
    parts = min(rows, parts)
    return [rows // parts + (part < rows % parts) for part in range(parts)]


# nested arguments and outputs


def _leaves(value: Any) -> list[Any]:
    found: list[Any] = []
    _over([value], found.extend)
    return found


def _over(parts: Sequence[Any], leaf: Callable[[list[Any]], Any]) -> Any:
    """Combine nested ``parts`` (dicts, lists, tuples, dataclasses): ``leaf`` gets the leaves at the same place in all parts as a list.

    >>> _over([{"a": [1, 2]}, {"a": [3, 4]}], sum)
    {'a': [4, 6]}
    """
    first, kind = parts[0], type(parts[0])
    if isinstance(first, MutableMapping) and all(type(part) is kind and part.keys() == first.keys() for part in parts):
        copied: Any = copy.copy(first)
        for key in first:
            copied[key] = _over([part[key] for part in parts], leaf)
        return copied
    listed = isinstance(first, (list, tuple)) and not isinstance(first, PackedSequence)
    if listed and all(type(part) is kind and len(part) == len(first) for part in parts):
        made = [_over(each, leaf) for each in zip(*parts, strict=True)]
        return kind(*made) if hasattr(first, "_fields") else kind(made)
    if is_dataclass(first) and not isinstance(first, type) and all(type(part) is kind for part in parts):
        copied = copy.copy(first)
        for field in fields(first):
            object.__setattr__(copied, field.name, _over([getattr(part, field.name) for part in parts], leaf))
        return copied
    return leaf(list(parts))


def _cut(leaf: list[Any], sizes: Sequence[int], devices: Sequence[torch.device], number: int) -> Any:
    """Return part ``number`` of a tensor that has one row for each sample; return anything else whole. ``leaf`` holds this one value.

    Tensors on the first of ``devices`` are moved to the part's device; others, such as lengths on the CPU, stay where they are.
    """
    (value,) = leaf
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, Pieces):
        if value.fits(sizes, devices):
            return value.taken()[number]
        value = value.whole()
    place = devices[number] if value.device == devices[0] else value.device
    if value.dim() == 0 or value.size(0) != sum(sizes):
        return value.to(place)
    return value.narrow(0, sum(sizes[:number]), sizes[number]).to(place, copy=True)


class _Unmergeable(Exception):
    """Raised when the outputs of the parts cannot be merged; the text describes the outputs and says what to do."""


def _merged(parts: list[Any], sizes: Sequence[int], loss: str | None, join: Callable[[list[torch.Tensor]], Any]) -> Any:
    """Merge the leaves of all parts into one leaf of the output.

    Args:
        parts: the leaf of each part.
        sizes: the number of samples of each part.
        loss: how a number combines the samples; with ``None``, the number must be equal in all parts.
        join: joins the tensors of the parts.

    Raises:
        _Unmergeable: the leaves cannot be merged.
    """
    first = parts[0]
    tensors = all(isinstance(part, torch.Tensor) for part in parts)
    if tensors and any(part.dim() for part in parts):
        _check_rows(parts, sizes)
        return join(parts)
    if (tensors and all(part.is_floating_point() for part in parts)) or all(isinstance(part, float) for part in parts):
        if loss is None and not all(_same(first, part) for part in parts):
            raise _Unmergeable(
                f"a number for each part of the batch ({', '.join(f'{float(part):.4g}' for part in parts)}). If this number is a mean or a "
                "sum over the samples, such as a loss, pass loss='mean' or loss='sum' to parwrap.data_parallel. Otherwise call the model "
                "inside of `with parwrap.data_parallel([device]):`, where one device computes the whole batch."
            )
        if loss is None and not tensors:
            return first
        # equal tensors are averaged too, so that gradients flow to all parts
        weights = [1.0] * len(sizes) if loss == "sum" else [size / sum(sizes) for size in sizes]
        if not tensors:
            return sum(part * weight for part, weight in zip(parts, weights, strict=True))
        return torch.stack([part.to(first.device) * weight for part, weight in zip(parts, weights, strict=True)]).sum(0)
    if all(part is first or (type(part) is type(first) and _same(first, part)) for part in parts):
        return first
    raise _Unmergeable(
        f"an object of type {type(first).__name__} that differs between the parts of the batch and has no row for each sample. Return "
        "tensors whose first dimension is the batch."
    )


def _same(one: Any, other: Any) -> bool:
    try:
        if isinstance(one, torch.Tensor):
            return torch.allclose(one, other.to(one.device), equal_nan=True)
        return math.isclose(one, other, rel_tol=1e-5) if isinstance(one, float) else bool(one == other)
    except (ValueError, TypeError, RuntimeError):
        return False


def _check_rows(parts: list[torch.Tensor], sizes: Sequence[int]) -> None:
    rows = [part.size(0) if part.dim() else 0 for part in parts]
    shapes = " and ".join(str(list(part.shape)) for part in parts)
    if any(row % size or row // size != rows[0] // sizes[0] for row, size in zip(rows, sizes, strict=True)):
        raise _Unmergeable(
            f"tensors of shape {shapes} for {' and '.join(map(str, sizes))} samples, which have no row for each sample. The first "
            "dimension of all inputs and outputs must be the batch. Otherwise call the model inside of `with "
            "parwrap.data_parallel([device]):`, where one device computes the whole batch."
        )
    if len({part.shape[1:] for part in parts}) > 1:
        raise _Unmergeable(
            f"tensors of shape {shapes} for the parts of a batch. All dimensions but the first must be equal: pad to the length of the "
            "whole batch, as pad_packed_sequence does with total_length."
        )
