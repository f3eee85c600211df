"""Unscales the gradients of a scaled loss: divides the gradients of one backward pass by the scale before they reach ``.grad``.

A hook on each leaf tensor divides, before the gradient is added to an existing ``.grad`` and before ranks average. So the result is right
for gradients of earlier backward passes, sparse gradients, gradients of inputs, and backward passes with ``create_graph=True``.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from parwrap.errors import UsageError
from parwrap.intercept.intercepted_calls import Backward
from parwrap.loop.losses import reached
from parwrap.torch_private.autograd import tensor_hooks

__all__ = ["Unscaling"]


class Unscaling:
    """Divides gradients while a backward of a scaled loss runs.

    Attributes:
        leaves: the leaf tensors that the last backward pass reached, by their ids, in the order in which they were found.
    """

    def __init__(self) -> None:
        self.leaves: dict[int, torch.Tensor] = {}
        self._retaining: list[weakref.ref[torch.Tensor]] = []
        self._hooks = ExitStack()
        self._unscale: Callable[[torch.Tensor | None], torch.Tensor | None] = lambda grad: grad

    def retain_grad(self, tensor: torch.Tensor) -> None:
        """Note that ``tensor``, which is not a leaf, retains its gradient.

        Torch's hook that retains the gradient runs after all other hooks, so the gradient is divided after the backward.
        """
        self._retaining = [known for known in self._retaining if known() is not None] + [weakref.ref(tensor)]

    @contextmanager
    def of(self, call: Backward, scale: float) -> Iterator[None]:
        """Divide gradients inside the block, where ``call`` runs with a loss that was multiplied by ``scale``."""
        self.leaves.clear()
        inverse = 1 / scale
        self._unscale = lambda grad: None if grad is None else grad * inverse
        kept = [tensor for known in self._retaining if (tensor := known()) is not None]
        kept += [each for each in call.options.get("inputs", ()) if isinstance(each, torch.Tensor) and not each.is_leaf]
        before = [(tensor, _taken(tensor)) for tensor in {id(tensor): tensor for tensor in kept}.values()]
        try:
            with self._hooks:
                self._watch(reached(call.roots))
                yield
        finally:
            for tensor, grad in before:
                tensor.grad = _sum(grad, self._unscale(_taken(tensor)))

    def nested(self, call: Backward, owned: Collection[int]) -> None:
        """Divide the gradients that ``call`` adds to parameters, and to the tensors of optimizers, whose ids ``owned`` has.

        ``call`` runs inside another backward pass, as in a re-entrant checkpoint. The other leaf tensors that ``call`` reaches stand for
        the inputs of the checkpoint. Their gradients continue into the outer backward, so these stay scaled.
        """
        self._watch(leaf for leaf in reached(call.roots) if isinstance(leaf, torch.nn.Parameter) or id(leaf) in owned)

    def _watch(self, leaves: Iterable[torch.Tensor]) -> None:
        """Divide the gradients of ``leaves`` until the backward ends, by hooks that run before the user's."""
        new = [leaf for leaf in leaves if id(leaf) not in self.leaves]
        _refuse_half(new)
        for leaf in new:
            self.leaves[id(leaf)] = leaf
            handle = leaf.register_hook(self._unscale)
            self._hooks.callback(handle.remove)
            hooks = tensor_hooks(leaf)
            if hooks is not None and len(hooks) > 1:  # the user's hooks see gradients too, so this one must run before them
                others = {number: hook for number, hook in hooks.items() if number != handle.id}
                for number, hook in others.items():
                    del hooks[number]
                    hooks[number] = hook


def _taken(tensor: torch.Tensor) -> torch.Tensor | None:
    """Remove and return the gradient of ``tensor``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns unless the tensor is a leaf
        grad, tensor.grad = tensor.grad, None
    return grad


def _sum(before: torch.Tensor | None, new: torch.Tensor | None) -> torch.Tensor | None:
    if before is None or new is None:
        return before if new is None else new
    return before + new


def _refuse_half(leaves: Iterable[torch.Tensor]) -> None:
    for leaf in leaves:
        if leaf.dtype is torch.float16 and isinstance(leaf, torch.nn.Parameter):
            raise UsageError(
                f"a parameter of shape {tuple(leaf.shape)} is already float16, so its gradients would underflow once they are unscaled. "
                "Keep the model in float32: parwrap.amp casts where this is faster. For a pure float16 model, use "
                "parwrap.amp(level='O3')."
            )
