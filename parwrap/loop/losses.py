"""Reads the autograd graph for what a backward reaches, without changing it; writes the mean over ranks into the loss (rule 5)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.weak import WeakTensorKeyDictionary

from parwrap.intercept.intercepted_calls import Backward
from parwrap.intercept.interceptor import Interceptor
from parwrap.torch_private.autograd import input_metadata, saved_sparse, saved_sum, view_base

__all__ = ["Losses", "counts_samples", "is_counted", "is_part_of_mean", "is_sum", "leading_sizes", "reached", "reenters", "sparsely_used"]

ALIAS = "AliasBackward0"
"""What makes a tensor's result one of the tensor's subclass: a view, for autograd."""

VIEWS = ("TBackward", "Transpose", "Permute", "View", "UnsafeView", "Expand", "Unsqueeze")


def reached(tensors: Iterable[torch.Tensor | GradientEdge]) -> list[torch.Tensor]:
    """The leaf tensors that would get a gradient from a backward pass of ``tensors``, in an order that the graph alone decides.

    >>> weight, x = torch.nn.Parameter(torch.ones(2)), torch.ones(2)
    >>> [leaf is weight for leaf in reached([(weight * x).sum()])]
    [True]
    """
    found = {id(node.variable): node.variable for node in _nodes(tensors) if hasattr(node, "variable")}
    return list(reversed(found.values()))


COUNTED = "parwrap: a part of the mean over all ranks"


def counts_samples(loss: torch.Tensor) -> None:
    """Note that ``loss`` is this rank's part of a mean over the samples of all ranks, whatever weight its batch has."""
    if loss.grad_fn is not None:
        cast(Any, loss.grad_fn).metadata[COUNTED] = True


def is_counted(loss: torch.Tensor) -> bool:
    """Whether :func:`counts_samples` has noted ``loss``, or the plain tensor of which a subclass has made it.

    >>> loss = torch.nn.Parameter(torch.ones(2)).sum() * 2
    >>> counts_samples(loss)
    >>> is_counted(loss), is_counted(loss * 2)
    (True, False)
    """
    node: Any = loss.grad_fn
    return node is not None and COUNTED in (node.next_functions[0][0] if node.name() == ALIAS else node).metadata


def is_part_of_mean(tensors: Iterable[torch.Tensor | GradientEdge]) -> bool:
    """Whether a backward of ``tensors`` reaches leaf tensors only through losses that :func:`counts_samples` has noted.

    >>> loss = torch.nn.Parameter(torch.ones(2)).sum() * 2
    >>> counts_samples(loss)
    >>> is_part_of_mean([loss]), is_part_of_mean([loss + torch.nn.Parameter(torch.ones(()))])
    (True, False)
    """
    return not any(hasattr(node, "variable") for node in _nodes(tensors, without=lambda node: COUNTED in node.metadata))


def is_sum(tensors: Iterable[torch.Tensor | GradientEdge]) -> bool:
    """Whether a loss function with ``reduction="sum"`` is one of ``tensors``, or was added to others to make one: nothing has divided it.

    >>> x, loss = torch.nn.Parameter(torch.ones(2)), torch.nn.MSELoss(reduction="sum")
    >>> is_sum([loss(x, torch.ones(2)) + x.sum()]), is_sum([loss(x, torch.ones(2)) / 2])
    (True, False)
    """
    return any(map(saved_sum, _nodes(tensors, without=lambda node: not (saved_sum(node) or node.name() == "AddBackward0"))))


def sparsely_used(tensors: Iterable[torch.Tensor | GradientEdge]) -> set[int]:
    """The ids of the leaf tensors that would get a sparse gradient: only embeddings with ``sparse=True`` use them.

    >>> embedding = torch.nn.Embedding(5, 2, sparse=True)
    >>> sparsely_used([embedding(torch.tensor([1])).sum()]) == {id(embedding.weight)}
    True
    """
    sparse: set[int] = set()
    dense: set[int] = set()
    for node in _nodes(tensors):
        for following, _ in node.next_functions:
            if hasattr(following, "variable"):
                (sparse if saved_sparse(node) else dense).add(id(following.variable))
    return sparse - dense


def reenters(tensors: Iterable[torch.Tensor | GradientEdge]) -> bool:
    """Whether a backward of ``tensors`` runs other backwards inside, as re-entrant checkpointing does.

    The graph does not show the parameters that these reach.

    >>> reenters([torch.nn.Parameter(torch.ones(2)).sum()])
    False
    """
    return any(node.name().startswith("CheckpointFunction") for node in _nodes(tensors))


def leading_sizes(tensors: Iterable[torch.Tensor | GradientEdge]) -> set[int]:
    """The first dimensions of the tensors in a backward of ``tensors``. The number of samples is usually one of them.

    >>> x, weight = torch.ones(3, 2), torch.nn.Parameter(torch.ones(5, 2))
    >>> sorted(leading_sizes([(x @ weight.T).sum()]))
    [3]
    """
    computed = (node for node in _nodes(tensors) if not hasattr(node, "variable") and not _is_view_of_leaf(node))
    return {int(kind.shape[0]) for kind in chain.from_iterable(map(input_metadata, computed)) if len(kind.shape)}


def _is_view_of_leaf(node: Any) -> bool:
    """Whether ``node`` only reshapes a parameter, as a layer does with its weight."""
    return node.name().startswith(VIEWS) and all(hasattr(following, "variable") for following, _ in node.next_functions)


def _nodes(tensors: Iterable[torch.Tensor | GradientEdge], without: Callable[[Any], bool] = lambda node: False) -> Iterator[Any]:
    """The nodes of the graph behind ``tensors``, each once, depth first, but not the nodes ``without`` and what is behind these only."""
    nodes = [
        each.node if isinstance(each, GradientEdge) else get_gradient_edge(each).node
        for each in tensors
        if isinstance(each, GradientEdge) or each.requires_grad
    ]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if without(node):
            continue
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)


def _filler(loss: torch.Tensor, data: torch.Tensor) -> Callable[[Any], Any] | None:
    """A function that writes a number into the ``data`` of ``loss``.

    ``None`` if ``loss`` is a leaf, or a view of a leaf or of a tensor of another shape.
    """
    if loss.grad_fn is None:
        return None
    base = view_base(loss)
    if base is not None and (loss.grad_fn.name() != ALIAS or base.shape != loss.shape or base.grad_fn is None):
        return None
    plain = type(loss) is torch.Tensor and data.is_cpu and data.dtype != torch.bfloat16
    return data.numpy().fill if plain else data.fill_  # numpy writes a number in a tenth of torch's time


class _Origin(NamedTuple):
    """A loss from which a scalar was computed, and the factor between them."""

    loss: weakref.ref[torch.Tensor]
    factor: float | torch.Tensor


class Root(NamedTuple):
    """The scalar that the script has called backward on.

    Attributes:
        data: its memory, outside of autograd.
        fill: writes a number into it; ``None`` if it is to stay as it is.
        origins: the losses that a scaler or a division has changed to get it, which are to be written too.
        scalar: the scalar itself.
    """

    data: torch.Tensor
    fill: Callable[[Any], Any] | None
    origins: Sequence[_Origin]
    scalar: torch.Tensor


class Losses(Interceptor):
    """The scalar that a backward is called on, to send it with the gradients and to write the mean over ranks into it.

    Args:
        written: called with each scalar into which the mean has been written.
    """

    def __init__(self, written: Callable[[torch.Tensor], None] | None = None) -> None:
        self._written = written
        self._origins: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # from a multiple of a loss to what it was computed from

    def scaled(self, loss: Any, scale: torch.Tensor, result: Any) -> None:
        for one, scaled in zip(loss, result, strict=True) if isinstance(loss, (list, tuple)) else [(loss, result)]:
            if isinstance(one, torch.Tensor):
                self._note(one, scale.to(one.device).reshape(()), scaled)

    def divided(self, loss: torch.Tensor, divisor: float, result: torch.Tensor) -> None:
        if divisor:
            self._note(loss, 1 / divisor, result)

    def _note(self, loss: torch.Tensor, factor: float | torch.Tensor, result: torch.Tensor) -> None:
        """Note that ``result`` is ``loss`` times ``factor``. The script may drop a loss between, as in ``loss / 4 / 3``."""
        before = [_Origin(each.loss, each.factor * factor) for each in self._origins.get(loss, ()) if each.loss() is not None]
        self._origins[result] = [_Origin(weakref.ref(loss), factor), *before]

    def root(self, call: Backward) -> Root | None:
        """The floating-point scalar that the script has called backward on, alone and without a gradient; ``None`` in other cases.

        What follows from it is looked up here, before the backward: after it nothing of this is in a cache of the processor.

        Nothing is to be written if the graph is kept, because a second backward may need the value. Leaves are not written, and neither
        are views, because they share memory with other numbers. A loss of a subclass of tensors is a view of one plain number: it is.
        """
        if len(call.given) != 1 or call.grad_tensors[0] is not None:
            return None
        root = call.given[0]
        if not isinstance(root, torch.Tensor) or root.numel() != 1 or not root.is_floating_point():
            return None
        data = root.data
        if call.keeps_graph:
            return Root(data, None, (), root)
        return Root(data, _filler(root, data), self._origins.get(root, ()) if self._origins else (), root)

    def write_mean(self, root: Root, mean: float | torch.Tensor) -> None:
        """Write ``mean`` into ``root``, and what follows from it into the losses that it was computed from."""
        if root.fill is not None:
            root.fill(mean)
            if self._written is not None:
                self._written(root.scalar)
        for each in root.origins:
            if (loss := each.loss()) is not None and (fill := _filler(loss, loss.data)) is not None:
                fill(mean / each.factor)
                if self._written is not None:
                    self._written(loss)
