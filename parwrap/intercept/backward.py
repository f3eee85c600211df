"""``loss.backward()`` and ``torch.autograd.backward(losses)``: forward the call to ``Interceptor.backward``.

``Tensor.backward`` looks up ``torch.autograd.backward`` when it is called, so one patch intercepts both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge

from parwrap.intercept.interceptor import Interceptor
from parwrap.patching.patch import Patch, is_patched
from parwrap.torch_private.autograd import input_metadata

__all__ = ["Backward", "patches"]


class Backward(NamedTuple):
    """One call of ``torch.autograd.backward``.

    Attributes:
        tensors: the tensors to differentiate.
        grad_tensors: the gradient of each; ``None`` stands for 1.
        options: ``retain_graph``, ``create_graph`` and ``inputs``, as given.
        original: torch's own function.
        averaged: whether to average its gradients over the ranks now; if not, later backward passes add to them first.
        weight: this rank's weight in the average, if ``tensors`` were already multiplied by it; ``None`` leaves both to the strategy.
        existing_grads: parameters whose earlier ``.grad`` is averaged now for the first time, whether or not the backward reaches them.
    """

    tensors: tuple[torch.Tensor | GradientEdge, ...]
    grad_tensors: tuple[torch.Tensor | None, ...]
    options: dict[str, Any]
    original: Callable[..., None]
    averaged: bool = True
    weight: float | None = None
    existing_grads: tuple[torch.Tensor, ...] = ()

    def run(self) -> None:
        """Run torch's function, or forward the call to the next interceptor."""
        options = self.options
        if (not self.averaged or self.weight is not None or self.existing_grads) and is_patched(self.original):
            options = {**options, "averaged": self.averaged, "weight": self.weight, "existing_grads": self.existing_grads}
        self.original(self.tensors, self.grad_tensors, **options)

    @property
    def roots(self) -> tuple[torch.Tensor | GradientEdge, ...]:
        """The tensors whose graphs lead to the leaves that get a gradient."""
        return self.options.get("inputs") or self.tensors

    def with_root(self, scalar: torch.Tensor, *leaves: torch.Tensor) -> Backward:
        """This call with one more root, whose gradient goes to ``leaves``."""
        options = {**self.options, "inputs": (*self.options["inputs"], *leaves)} if "inputs" in self.options else self.options
        return self._replace(tensors=(*self.tensors, scalar), grad_tensors=(*self.grad_tensors, None), options=options)

    def scaled(self, factor: float) -> Backward:
        """This call with its gradients multiplied by ``factor``."""
        with torch.enable_grad():
            pairs = [_scaled(tensor, grad, factor) for tensor, grad in zip(self.tensors, self.grad_tensors, strict=True)]
        return self._replace(tensors=tuple(tensor for tensor, _ in pairs), grad_tensors=tuple(grad for _, grad in pairs))


def _scaled(
    tensor: torch.Tensor | GradientEdge, grad: torch.Tensor | None, factor: float
) -> tuple[torch.Tensor | GradientEdge, torch.Tensor | None]:
    """A root and its gradient, multiplied by ``factor``; an edge has no value to multiply."""
    if isinstance(tensor, torch.Tensor):
        return tensor * factor, grad
    if grad is None:
        kind = input_metadata(tensor.node)[tensor.output_nr]
        if math.prod(kind.shape) != 1:
            return tensor, None  # torch refuses it
        grad = torch.ones(tuple(kind.shape), dtype=kind.dtype, device=kind.device)
    return tensor, grad * factor


def patches(interceptor: Interceptor) -> list[Patch]:
    def backward(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> None:
        interceptor.backward(_bound(wrapped, *args, **kwargs))

    return [Patch(torch.autograd, "backward", backward)]


def _bound(
    original: Callable,
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
    averaged: bool = True,
    weight: float | None = None,
    existing_grads: tuple[torch.Tensor, ...] = (),
) -> Backward:
    """The call, from arguments as in torch's own signature; the deprecated ``grad_variables`` is the old name of ``grad_tensors``.

    An interceptor that forwards the call passes the last three.
    """
    tensors = (tensors,) if isinstance(tensors, (torch.Tensor, GradientEdge)) else tuple(tensors)
    grad_tensors = grad_variables if grad_tensors is None else grad_tensors
    if not isinstance(grad_tensors, (tuple, list)):
        grad_tensors = (grad_tensors,) * len(tensors)
    options: dict[str, Any] = {"retain_graph": retain_graph, "create_graph": create_graph}
    if inputs is not None:
        options["inputs"] = (
            (inputs,)
            if isinstance(inputs, (torch.Tensor, GradientEdge))
            else tuple(inputs.values() if isinstance(inputs, dict) else inputs)
        )
    return Backward(tensors, tuple(grad_tensors), options, original, averaged, weight, existing_grads)
