"""Outputs that stay on the devices of their replicas: a tensor in pieces. Losses are computed on the device of each piece.

Any other operation uses the whole tensor, which is joined on the first device when it is first used. From then on losses use the whole
tensor too, because it may have changed. So results are always those of a model on one device.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from parwrap.errors import UsageError
from parwrap.places import script_place
from parwrap.ranks.structures import leaves, mapped
from parwrap.strategies.replicas import run_together
from parwrap.torch_private.tensors import disable_torch_function, make_wrapper_subclass

__all__ = ["Pieces", "in_whole", "whole"]


class Pieces(torch.Tensor):
    """A tensor whose rows are on several devices.

    Args:
        pieces: parts of the tensor, each with some of its rows, in order.

    >>> halves = Pieces([torch.zeros(2, 3), torch.ones(2, 3)])
    >>> halves.shape, halves.is_in_pieces
    (torch.Size([4, 3]), True)
    >>> halves.mean(), halves.is_in_pieces
    (tensor(0.5000), False)
    """

    pieces: tuple[torch.Tensor, ...]
    _whole: torch.Tensor | None
    _was_taken: bool

    @staticmethod
    def __new__(cls, pieces: Sequence[torch.Tensor]) -> Pieces:
        made = _Joined.apply(cls, (sum(map(len, pieces)), *pieces[0].shape[1:]), *pieces)
        made.pieces, made._whole, made._was_taken = tuple(pieces), None, False
        return made

    @property
    def is_in_pieces(self) -> bool:
        """Whether losses may still use the pieces: nothing has used the whole tensor yet, and its graph, if any, leads to the pieces."""
        return self._whole is None and not self._only_it_has_gradients

    @property
    def _only_it_has_gradients(self) -> bool:
        return self.requires_grad and not any(piece.requires_grad for piece in self.pieces)

    @property
    def sizes(self) -> list[int]:
        """The number of rows of each piece."""
        return [len(piece) for piece in self.pieces]

    def fits(self, sizes: Sequence[int], devices: Sequence[torch.device] | None = None) -> bool:
        """Whether this tensor is still in pieces, of these ``sizes`` and, if given, on these ``devices``."""
        on = [piece.device for piece in self.pieces]
        return self.is_in_pieces and self.sizes == list(sizes) and on == list(devices or on)

    def taken(self) -> tuple[torch.Tensor, ...]:
        """The pieces, for an operation whose gradients go to the pieces. From then on, asking for a gradient of this tensor is an error."""
        self._was_taken = True
        return self.pieces

    def whole(self) -> torch.Tensor:
        """The whole tensor, on the first device."""
        if self._whole is None:
            # join in the modes in which the model ran, because the first use may be under no_grad
            with torch.inference_mode(self.pieces[0].is_inference()), torch.set_grad_enabled(self.requires_grad):
                self._whole = _Whole.apply(self) if self._only_it_has_gradients else in_whole(self.pieces)
        return self._whole

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if function in _ASKS_FOR_NO_NUMBERS:
            with disable_torch_function():
                return function(*args, **kwargs)
        watched = (args[0],) if function in _WATCHES_GRADIENTS else args[1] if function == torch.autograd.grad else ()
        if any(isinstance(each, Pieces) and each._was_taken for each in watched):
            raise UsageError(
                f"{script_place()} calls {function.__name__} on the outputs of a model, which get no gradient: with "
                "parwrap.data_parallel(gather=False) their loss was computed on the pieces on each device. Gather the outputs before the "
                "loss, for example with outputs = 1 * outputs, or remove gather=False."
            )
        given = [each for each in leaves((args, kwargs)).values() if isinstance(each, Pieces)]
        if function in _LOSSES and all(each.is_in_pieces for each in given):
            loss = _LOSSES[function](function, inspect.signature(function).bind(*args, **kwargs).arguments)
            if loss is not None:
                return loss
        args, kwargs = mapped((args, kwargs), whole)
        return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):  # type: ignore[override]
        raise NotImplementedError(f"{function} does not support outputs in pieces: use parwrap.data_parallel without gather=False.")


class _Joined(torch.autograd.Function):
    """Makes one tensor of the pieces, as an operation in the autograd graph.

    An autograd function that the script applies to the tensor bypasses ``__torch_function__``. The gradient that then arrives here is split
    by rows, and goes on to the pieces.
    """

    @staticmethod
    def forward(ctx: Any, cls: type, shape: Sequence[int], *pieces: torch.Tensor) -> torch.Tensor:
        ctx.places = [(len(piece), piece.device) for piece in pieces]
        return make_wrapper_subclass(cls, shape, dtype=pieces[0].dtype, device=pieces[0].device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        rows = grad.split([size for size, _ in ctx.places])
        return None, None, *(part.to(device) for part, (_, device) in zip(rows, ctx.places, strict=True))


class _Whole(torch.autograd.Function):
    """Joins pieces whose graph is hidden, because an autograd function, such as a checkpoint, has returned the tensor."""

    @staticmethod
    def forward(ctx: Any, pieces: Pieces) -> torch.Tensor:
        return in_whole(pieces.pieces)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


_FIELDS = ("shape", "dtype", "device", "requires_grad", "ndim", "is_cuda", "layout", "is_nested")
_ASKS_FOR_NO_NUMBERS = {
    *(getattr(torch.Tensor, name).__get__ for name in _FIELDS),
    *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.__len__, torch.Tensor.numel, torch.Tensor.is_floating_point),
}
_WATCHES_GRADIENTS = {torch.Tensor.retain_grad, torch.Tensor.register_hook}


def whole(leaf: Any) -> Any:
    """``leaf``, or the whole tensor if ``leaf`` is a tensor in pieces."""
    return leaf.whole() if isinstance(leaf, Pieces) else leaf


def in_whole(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The rows of all ``parts`` in one tensor, on the device of the first part."""
    return torch.cat([part.to(parts[0].device) for part in parts])


# losses


def _mean_of_elements(function: Callable, given: dict[str, Any]) -> torch.Tensor | None:
    """Compute an elementwise loss piece by piece; return ``None`` if it needs the whole tensor."""
    input, target = given["input"], given["target"]
    if not _plain(given) or input.shape != target.shape or not input.dim():
        return None
    values = _on_each(function, given)
    reduction = given.get("reduction", "mean")
    if reduction == "none":
        return Pieces(values)
    if reduction == "sum":
        return _sum(values)
    total = sum(piece.numel() for piece in input.pieces)
    return _sum([value * (piece.numel() / total) for value, piece in zip(values, input.pieces, strict=True)])


def _mean_of_labels(function: Callable, given: dict[str, Any]) -> torch.Tensor | None:
    """Compute a classification loss piece by piece: its mean is over labels that are not ignored, weighted by class.

    Return ``None`` if it needs the whole tensor.
    """
    input, target, weight = given["input"], given["target"], given.get("weight")
    if not _plain(given, "weight") or input.dim() < 2 or not target.dim() or len(target) != len(input) or isinstance(weight, Pieces):
        return None
    reduction = given.get("reduction", "mean")
    if reduction != "mean":
        values = _on_each(function, given)
        return Pieces(values) if reduction == "none" else _sum(values)
    # sums in half precision overflow where means would not
    half = input.dtype in (torch.float16, torch.bfloat16) and not torch.is_autocast_enabled(input.device.type)
    sums = _on_each(function, {**given, "reduction": "sum"}, torch.Tensor.float if half else None)
    ignored = given.get("ignore_index", -100)
    counts = [_count(*pair, weight, ignored) for pair in zip(input.pieces, _like(target, input), strict=True)]
    mean = _sum(sums) / _sum(counts)
    return mean.to(input.dtype) if half else mean


def _count(piece: torch.Tensor, label: torch.Tensor, weight: torch.Tensor | None, ignored: int) -> torch.Tensor:
    """The number by which to divide the summed losses of a piece to get their mean."""
    if label.is_floating_point():  # probabilities of classes
        return torch.tensor(piece.numel() / piece.size(1), device=piece.device)
    counts = label != ignored
    if weight is None:
        return counts.sum()
    return weight.to(piece.device)[torch.where(counts, label, 0)][counts].sum()


_LOSSES: dict[Callable, Callable[[Callable, dict[str, Any]], torch.Tensor | None]] = {
    **dict.fromkeys(
        (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits),
        _mean_of_elements,
    ),
    **dict.fromkeys((F.cross_entropy, F.nll_loss), _mean_of_labels),
}


def _plain(given: dict[str, Any], *taken: str) -> bool:
    """Whether a loss can be computed piece by piece: its target fits, and it has no weights or deprecated arguments except ``taken``."""
    input, target = given["input"], given["target"]
    if not isinstance(input, Pieces) or given.get("reduction", "mean") not in ("mean", "sum", "none"):
        return False
    if isinstance(target, Pieces) and not target.fits(input.sizes):
        return False
    return all(given.get(name) is None for name in {"weight", "pos_weight", "size_average", "reduce"}.difference(taken))


def _on_each(function: Callable, given: dict[str, Any], cast: Callable | None = None) -> list[torch.Tensor]:
    """Call ``function`` on each piece of its input, with the matching piece of the target. ``cast``, if given, changes the piece first."""
    pieces = given["input"].taken()
    calls = []
    for piece, label in zip(pieces, _like(given["target"], given["input"]), strict=True):
        own = {name: each.to(piece.device) for name, each in given.items() if isinstance(each, torch.Tensor) and name not in _CUT}
        own |= {"input": piece if cast is None else cast(piece), "target": label}
        calls.append(functools.partial(function, **{**given, **own}))
    return run_together([piece.device for piece in pieces], calls)


_CUT = ("input", "target")


def _like(target: torch.Tensor, input: Pieces) -> Sequence[torch.Tensor]:
    """The pieces of ``target`` that match those of ``input``."""
    if isinstance(target, Pieces):
        return target.taken()
    return [part.to(piece.device) for part, piece in zip(target.split(input.sizes), input.pieces, strict=True)]


def _sum(numbers: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([number.to(numbers[0].device) for number in numbers]).sum(0)
