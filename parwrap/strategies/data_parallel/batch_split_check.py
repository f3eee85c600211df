"""Checks whether a call in parts gives the same as on the whole batch: runs both on copies of the module, and compares the results.

A trial has no side effects: copies have separate buffers and attributes, random draws are constant, and the random streams are restored
afterwards. Batch norms use their running statistics, because ``sync_bn`` handles their parts. Callers decide when to run a trial.
"""

from __future__ import annotations

import math
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from parwrap.errors import UsageError
from parwrap.strategies.data_parallel.replicas import replicas
from parwrap.strategies.data_parallel.scatter_gather import cut, is_number
from parwrap.strategies.data_parallel.sharded_outputs import Pieces, in_whole
from parwrap.torch_private.modes import PRIVATE_SAMPLERS, TorchDispatchMode, operator_schema
from parwrap.torch_private.modules import (
    BUFFERS,
    FLAT_WEIGHTS,
    MODULES,
    PARAMETERS,
    BatchNorm,
    NormBase,
    registered_buffers,
    registered_parameters,
)
from parwrap.torch_private.pytree import tree_leaves, tree_map_only

__all__ = ["Untried", "note_call", "why_not_in_parts"]

_here = threading.local()


class Untried(str):
    """The reason why a call could not be checked: a copy of the module fails even on the whole batch."""


def why_not_in_parts(
    module: nn.Module, given: tuple[tuple, dict], sizes: Sequence[int], merge: Callable[[list[Any]], Any], loss: str | None
) -> str | None:
    """Why a call of ``module`` must not be cut into parts; ``None`` if the results are the same.

    Args:
        given: the positional and keyword arguments of the call.
        sizes: the number of samples of each part.
        merge: merges the outputs of the parts.
        loss: how numbers that the module returns combine the samples: ``"mean"`` or ``"sum"``; ``None`` if unknown.

    Raises:
        torch.OutOfMemoryError: the trial does not fit in memory.
    """
    device = next(module.parameters()).device
    given = tree_map_only(torch.Tensor, _detached, given)
    failed: Exception | None = None
    for grad in dict.fromkeys((False, torch.is_grad_enabled())):  # some models run a backward inside
        with torch.set_grad_enabled(grad):
            try:
                return _compared(module, given, sizes, merge, loss, device)
            except torch.OutOfMemoryError:
                raise
            except _Foreign as error:
                return str(error)
            except Exception as error:
                failed = error
    return Untried(f"it cannot be checked on a copy ({_short(failed)})")


def _compared(
    module: nn.Module, given: Any, sizes: Sequence[int], merge: Callable[[list[Any]], Any], loss: str | None, device: torch.device
) -> str | None:
    near = _near(module, device)
    taken = tree_map_only(torch.Tensor, torch.clone, given)
    whole, copy = _tried(module, taken, device)
    if not _alike(taken, given, 0.0):
        return "it changes its input in place, but each part of the batch is a copy"
    try:
        parts = cut(given, sizes, [device] * len(sizes))
        output, first = _tried(module, parts[0], device)
        outputs = [output, *(_tried(module, part, device)[0] for part in parts[1:])]
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return f"it fails on a part of the batch ({_short(error)})"
    try:
        joined = merge(outputs)
    except UsageError as error:
        return f"its outputs for parts of the batch cannot be combined ({error})" if not _numbers(whole) else _number(loss)
    if loss is None and any(not number for number in _numbers(whole)):  # 0 may be a mean, a sum or a constant
        return _number(loss)
    if not _alike(joined, whole, near):
        numbers_differ = _numbers(whole) and not all(_alike(*pair, near) for pair in zip(_numbers(joined), _numbers(whole), strict=False))
        return _number(loss) if numbers_differ else MIXED
    left = _left_otherwise(copy, first, near)
    return None if left is None else f"it changes {left}, and changes it differently for a part of the batch"


MIXED = (
    "its outputs for parts of the batch differ from those for the whole batch: it mixes samples, or the first dimension of its inputs or "
    "outputs is not the batch"
)


def _number(loss: str | None) -> str:
    if loss is not None:
        return f"a number that it returns for the whole batch is not the {loss} over the samples, although loss={loss!r} says so"
    return (
        "it returns a number for the whole batch, such as a loss or a count. If it is a loss that is always the mean or the sum over the "
        "samples, even with padding, pass loss='mean' or loss='sum'"
    )


def _short(error: Exception | None) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, Pieces):
        tensor = in_whole(tensor.pieces) if tensor.is_in_pieces else tensor.whole()
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _tried(module: nn.Module, given: tuple[tuple, dict], device: torch.device) -> tuple[Any, nn.Module]:
    """The output of a copy of ``module`` for the arguments ``given``, and the copy."""
    _, copy = replicas(module, [device, device])
    for each in copy.modules():
        if isinstance(each, NormBase):
            each.training = False
        if isinstance(each, BatchNorm) and each.running_mean is None:
            like = next(module.parameters()).new_zeros
            each.running_mean, each.running_var = like(each.num_features), like(each.num_features) + 1
    args, kwargs = given
    with _own_modules(copy), _no_chance(device):
        return copy(*args, **kwargs), copy


class _Foreign(BaseException):
    """Ends a trial; not an ``Exception``, so that the script's own handlers do not catch it."""


@contextmanager
def _own_modules(copy: nn.Module) -> Iterator[None]:
    """Inside the block, end the trial if this thread calls a module outside of ``copy``, which all replicas would share."""
    _here.own = {id(each) for each in copy.modules()}
    try:
        yield
    finally:
        _here.own = None


def note_call(module: nn.Module) -> None:
    """End this thread's trial if ``module`` has parameters or buffers but is not part of the copy."""
    own = getattr(_here, "own", None)
    if own is not None and id(module) not in own and any(True for held in (module.parameters(), module.buffers()) for _ in held):
        raise _Foreign(f"it calls a {type(module).__name__} that is not registered as a submodule, so its replicas would share that module")


@contextmanager
def _no_chance(device: torch.device) -> Iterator[None]:
    """Make random draws constant inside the block, and restore the random streams afterwards."""
    numpy: Any = sys.modules.get("numpy")
    drawn, drawn_by_numpy = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), _Constant():
            yield
    finally:
        random.setstate(drawn)
        if numpy is not None:
            numpy.random.set_state(drawn_by_numpy)


class _Constant(TorchDispatchMode):
    """Makes random tensors constant and turns dropout off."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
            return func(*args, **kwargs)
        schema = operator_schema(func)
        name = schema.name.removeprefix("aten::")
        for place, argument in enumerate(schema.arguments):
            if argument.name in ("dropout", "dropout_p") or (argument.name == "p" and "dropout" in name):
                if place < len(args):
                    args = (*args[:place], 0.0, *args[place + 1 :])
                elif argument.name in kwargs:
                    kwargs[argument.name] = 0.0
        out = func(*args, **kwargs)
        if name.startswith(_DRAWS):
            tree_map_only(torch.Tensor, lambda t: t.fill_(0.5 if t.is_floating_point() else 0), out)
        return out


_DRAWS = (
    *("rand", "normal", "uniform", "exponential", "geometric", "cauchy", "log_normal", "poisson", "binomial", "bernoulli", "multinomial"),
    *PRIVATE_SAMPLERS,
)


def _near(module: nn.Module, device: torch.device) -> float:
    """The relative difference allowed between numbers that were summed in a different order."""
    half = any(p.dtype in (torch.float16, torch.bfloat16) for p in module.parameters())
    if half or torch.is_autocast_enabled(device.type):
        return 5e-2
    return 1e-2 if device.type == "cuda" else 1e-3  # GPU matrix products may have 10 bits (TF32)


def _numbers(values: Any) -> list[Any]:
    found = []
    for leaf in tree_leaves(values):
        if is_number(leaf):
            found.append(leaf)
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, (torch.Tensor, nn.Module, type)):
            found += _numbers(dict(leaf) if isinstance(leaf, dict) else vars(leaf))
    return found


def _alike(one: Any, other: Any, near: float) -> bool:
    """Whether two nested values are equal, up to rounding of floating-point numbers."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return _alike_tensors(one.detach(), other.detach(), near)
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return math.isclose(one, other, rel_tol=near) or (math.isnan(one) and math.isnan(other))
    if isinstance(one, dict):
        if one.keys() != other.keys() or not all(_alike(one[key], other[key], near) for key in one):
            return False
    elif isinstance(one, (list, tuple)):
        if len(one) != len(other) or not all(_alike(*pair, near) for pair in zip(one, other, strict=True)):
            return False
    elif not hasattr(one, "__dict__"):
        same = one == other
        return bool(same.all() if hasattr(same, "all") else same)
    own = getattr(one, "__dict__", None)
    return own is None or own is one or isinstance(one, (nn.Module, type)) or _alike(own, vars(other), near)


def _alike_tensors(one: torch.Tensor, other: torch.Tensor, near: float) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if torch.equal(one, other.to(one.device)):
        return True
    if not (one.is_floating_point() or one.is_complex()):
        enough = 0.9 if near and one.dim() else 1.0  # for example argmax: rounding decides between nearly equal numbers
        return not one.numel() or (one == other).double().mean().item() >= enough
    one, other = (each.to(torch.complex128 if each.is_complex() else torch.float64) for each in (one, other.to(one.device)))
    sizes = other.abs().nan_to_num(0, 0, 0)
    if sizes.dim() and sizes.numel():
        sizes = torch.maximum(sizes.amax(0, keepdim=True), sizes.amax() * 1e-3)  # each feature has its own scale
    return bool(((one == other) | ((one - other).abs() <= near * sizes) | (one.isnan() & other.isnan())).all())


def _left_otherwise(copy: nn.Module, part: nn.Module, near: float) -> str | None:
    """The name of an attribute that differs after a forward of the whole batch and one of a part; ``None`` if all are equal."""
    for (path, each), other in zip(copy.named_modules(), part.modules(), strict=False):
        for held, others in ((registry(each), registry(other)) for registry in (vars, registered_parameters, registered_buffers)):
            for name in {**held, **others}:
                if name in (MODULES, PARAMETERS, BUFFERS, FLAT_WEIGHTS):
                    continue
                if name not in held or name not in others or not _alike(held[name], others[name], near):
                    return f"{path}.{name}".removeprefix(".")
    return None
