"""``loss.backward()`` and ``torch.autograd.backward(losses)``: hand the call to ``actor.backward``.

``Tensor.backward`` looks ``torch.autograd.backward`` up when it is called, so one patch catches both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from parwrap.patching import Patch

__all__ = ["Backward", "patches"]


@dataclass(frozen=True)
class Backward:
    """The arguments of one ``torch.autograd.backward``.

    Attributes:
        tensors: what is differentiated.
        grad_tensors: the gradient of each; ``None`` stands for 1.
        options: ``retain_graph``, ``create_graph`` and ``inputs``, as far as they were given.
        original: torch's own function.
    """

    tensors: tuple[torch.Tensor, ...]
    grad_tensors: tuple[torch.Tensor | None, ...]
    options: dict[str, Any]
    original: Callable[..., None]

    def run(self) -> None:
        """Do what torch does."""
        self.original(self.tensors, self.grad_tensors, **self.options)

    def with_root(self, tensor: torch.Tensor, gradient: torch.Tensor) -> Backward:
        """The same backward with one more leaf to start from."""
        options = {**self.options, "inputs": (*self.options["inputs"], tensor)} if "inputs" in self.options else self.options
        return Backward((*self.tensors, tensor), (*self.grad_tensors, gradient), options, self.original)

    def scaled(self, factor: float) -> Backward:
        """The same backward with all gradients multiplied by ``factor``."""
        gradients = tuple(
            torch.full_like(tensor, factor) if gradient is None else gradient * factor
            for tensor, gradient in zip(self.tensors, self.grad_tensors, strict=True)
        )
        return replace(self, grad_tensors=gradients)


def patches(actor: Any) -> list[Patch]:
    def backward(wrapped: Callable, instance: Any, args: tuple, kwargs: dict) -> None:
        actor.backward(_bound(wrapped, *args, **kwargs))

    return [Patch(torch.autograd, "backward", backward)]


def _bound(
    original: Callable,
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> Backward:
    """The call with torch's own signature taken apart; its deprecated ``grad_variables`` is an older ``grad_tensors``."""
    tensors = (tensors,) if isinstance(tensors, (torch.Tensor, GradientEdge)) else tuple(tensors)
    grad_tensors = grad_variables if grad_tensors is None else grad_tensors
    if not isinstance(grad_tensors, (tuple, list)):
        grad_tensors = (grad_tensors,) * len(tensors)
    options: dict[str, Any] = {"retain_graph": retain_graph, "create_graph": create_graph}
    if inputs is not None:
        options["inputs"] = (
            (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs.values() if isinstance(inputs, dict) else inputs)
        )
    return Backward(tensors, tuple(grad_tensors), options, original)
