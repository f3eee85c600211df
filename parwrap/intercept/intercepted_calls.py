"""What an interceptor gets for calls that need more than their arguments: an object that runs the call, unchanged or changed."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.optim import Optimizer

from parwrap.intercept.patch import is_patched
from parwrap.torch_private.autograd import input_metadata

__all__ = ["Backward", "Batches", "Clip", "Criterion", "Norm", "ScalerCall"]


class Backward(NamedTuple):
    """One call of ``torch.autograd.backward``.

    Attributes:
        tensors: the tensors to differentiate.
        grad_tensors: the gradient of each; ``None`` stands for 1.
        options: ``retain_graph``, ``create_graph`` and ``inputs``, as given.
        original: torch's own function, or the next interceptor's.
        given: the tensors that the script has passed, of which ``tensors`` may be multiples.
    """

    tensors: tuple[torch.Tensor | GradientEdge, ...]
    grad_tensors: tuple[torch.Tensor | None, ...]
    options: dict[str, Any]
    original: Callable[..., None]
    given: tuple[torch.Tensor | GradientEdge, ...]

    def run(self) -> None:
        """Run torch's function, or forward the call to the next interceptor."""
        kept = {"given": self.given} if is_patched(self.original) else {}
        self.original(self.tensors, self.grad_tensors, **self.options, **kept)

    @property
    def roots(self) -> tuple[torch.Tensor | GradientEdge, ...]:
        """The tensors whose graphs are searched for leaves: ``inputs`` if there are any, else ``tensors``."""
        return self.options.get("inputs") or self.tensors

    @property
    def keeps_graph(self) -> bool:
        """Whether the graph can be used again after this call."""
        return bool(self.options.get("retain_graph") or self.options.get("create_graph"))

    def run_with(self, root: torch.Tensor, leaf: torch.Tensor) -> None:
        """Like :meth:`run`, with one more root, whose gradient goes to ``leaf``."""
        options = {**self.options, "inputs": (*self.options["inputs"], leaf)} if "inputs" in self.options else self.options
        kept = {"given": self.given} if is_patched(self.original) else {}
        self.original((*self.tensors, root), (*self.grad_tensors, None), **options, **kept)

    def times(self, factor: float) -> Backward:
        """This call with its gradients multiplied by ``factor``."""
        if factor == 1.0:
            return self
        with torch.enable_grad():
            pairs = [_times(tensor, grad, factor) for tensor, grad in zip(self.tensors, self.grad_tensors, strict=True)]
        return self._replace(tensors=tuple(tensor for tensor, _ in pairs), grad_tensors=tuple(grad for _, grad in pairs))


def _times(
    tensor: torch.Tensor | GradientEdge, grad: torch.Tensor | None, factor: float
) -> tuple[torch.Tensor | GradientEdge, torch.Tensor | None]:
    """A root of a backward and its gradient, changed so that their product is ``factor`` times as large.

    The root is multiplied if it is a tensor. An edge has no value, so its gradient is multiplied.
    """
    if isinstance(tensor, torch.Tensor):
        return tensor * factor, grad
    if grad is None:
        kind = input_metadata(tensor.node)[tensor.output_nr]
        if math.prod(kind.shape) != 1:
            return tensor, None  # torch refuses it
        grad = torch.ones(tuple(kind.shape), dtype=kind.dtype, device=kind.device)
    return tensor, grad * factor


class Batches:
    """What ``iter(loader)`` returns: an iterator with the length of torch's iterator and, once ``batches`` is set, its attributes.

    Subclasses add to ``__next__``.

    It is no generator, because a script may read on after an error of a sample.

    Attributes:
        batches: torch's iterator, or that of the next interceptor; ``None`` before it is made.
    """

    def __init__(self, batches: Iterator | None) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return next(cast(Iterator, self.batches))

    def __len__(self) -> int:
        return len(cast(Any, self.batches))

    def __getattr__(self, name: str) -> Any:
        if name == "batches" or name.startswith("__") or self.batches is None:  # copy and pickle may ask before there are any
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.batches, name)


class Criterion(NamedTuple):
    """A mean loss over classified targets.

    Attributes:
        loss: the mean.
        target: the class of each item.
        weight: the weights of the classes.
        ignore_index: the class of ignored targets.
    """

    loss: torch.Tensor
    target: torch.Tensor
    weight: torch.Tensor | None
    ignore_index: int

    @torch.no_grad()
    def divisor(self) -> torch.Tensor:
        """The number by which the sum of the losses is divided to get the mean."""
        counted = self.target != self.ignore_index
        if self.weight is None:
            return counted.sum()
        return (self.weight[torch.where(counted, self.target, 0).long()] * counted).sum()


class ScalerCall(NamedTuple):
    """The script's own call of a method of a ``GradScaler``.

    Attributes:
        scaler: the scaler.
        name: ``"unscale_"``, ``"step"`` or ``"update"``.
        optimizer: the optimizer of the gradients; ``None`` for ``update``.
        run: runs torch's method.
    """

    scaler: torch.amp.GradScaler
    name: str
    optimizer: Optimizer | None
    run: Callable[[], Any]


class Clip(NamedTuple):
    """A call of ``clip_grad_norm_``, ``clip_grad_value_`` or ``clip_grads_with_norm_``.

    Attributes:
        name: the name of the function.
        parameters: the parameters whose gradients are clipped.
        args: the arguments after ``parameters``.
        kwargs: the keyword arguments.
        original: torch's own function, or the next interceptor's.
    """

    name: str
    parameters: list[torch.Tensor]
    args: tuple
    kwargs: dict[str, Any]
    original: Callable

    def run(self) -> Any:
        """Run torch's function, or the next interceptor's."""
        return self.original(self.parameters, *self.args, **self.kwargs)

    def run_later(self) -> None:
        """Clip the gradients that the parameters have now; a norm that was given is computed again."""
        if self.name == "clip_grads_with_norm_":
            nn.utils.clip_grad_norm_(self.parameters, *self.args[:1], **{k: v for k, v in self.kwargs.items() if k != "total_norm"})
        else:
            self.run()

    def norm(self) -> torch.Tensor | None:
        """The norm that ``clip_grad_norm_`` returns, without clipping; ``None`` for the other functions."""
        if self.name != "clip_grad_norm_":
            return None

        def total(max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None) -> torch.Tensor:
            grads = [p.grad for p in self.parameters if p.grad is not None]
            return nn.utils.get_total_norm(grads, norm_type, error_if_nonfinite, foreach)

        return total(*self.args, **self.kwargs)


class Norm(NamedTuple):
    """The arguments of one ``torch.nn.functional.batch_norm``; ``original`` is torch's own function, or the next interceptor's."""

    original: Callable[..., torch.Tensor]
    input: torch.Tensor
    running_mean: torch.Tensor | None
    running_var: torch.Tensor | None
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    training: bool = False
    momentum: float = 0.1
    eps: float = 1e-5

    def run(self) -> torch.Tensor:
        """Run torch's function, or forward the call to the next interceptor."""
        return self.original(*self[1:])

    def run_by_itself(self) -> torch.Tensor:
        """Run torch's function, without any other interceptor."""
        return inspect.unwrap(self.original)(*self[1:])
