"""Finds what a backward reaches, by reading the autograd graph without changing it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from parwrap.torch_private.autograd import input_metadata, saved_input, saved_sparse, saved_tensors, saved_training

__all__ = ["leading_sizes", "normalizes_by_torch", "reached", "reenters", "saved_of", "sparsely_used"]

VIEWS = ("TBackward", "Transpose", "Permute", "View", "UnsafeView", "Expand", "Unsqueeze")


def reached(tensors: Iterable[torch.Tensor | GradientEdge]) -> list[torch.Tensor]:
    """The leaf tensors that would get a gradient from a backward pass of ``tensors``, those used first in the forward pass first.

    >>> weight, x = torch.nn.Parameter(torch.ones(2)), torch.ones(2)
    >>> [leaf is weight for leaf in reached([(weight * x).sum()])]
    [True]
    """
    found = {id(node.variable): node.variable for node in _nodes(tensors) if hasattr(node, "variable")}
    return list(found.values())


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
    """Whether a backward of ``tensors`` runs others inside it, as re-entrant checkpointing does: its leaves are hidden.

    >>> reenters([torch.nn.Parameter(torch.ones(2)).sum()])
    False
    """
    return any(node.name().startswith("CheckpointFunction") for node in _nodes(tensors))


def leading_sizes(tensors: Iterable[torch.Tensor | GradientEdge]) -> set[int]:
    """The first dimensions of the tensors in a backward of ``tensors``; one of them is the number of samples.

    A tensor without a graph has its own.

    >>> x, weight = torch.ones(3, 2), torch.nn.Parameter(torch.ones(5, 2))
    >>> sorted(leading_sizes([(x @ weight.T).sum()])), leading_sizes([x])
    ([3], {3})
    """
    tensors = list(tensors)
    computed = (node for node in _nodes(tensors) if not hasattr(node, "variable") and not _is_view_of_leaf(node))
    kinds = chain(_without_graph(tensors), chain.from_iterable(map(input_metadata, computed)))
    return {int(kind.shape[0]) for kind in kinds if len(kind.shape)}


def saved_of(tensors: Iterable[torch.Tensor | GradientEdge]) -> Iterator[torch.Tensor]:
    """The tensors that the graph of ``tensors`` has saved for the backward, those saved last first; a tensor without a graph itself.

    >>> x, target = torch.ones(3, requires_grad=True), torch.zeros(3)
    >>> any(saved is target for saved in saved_of([torch.nn.functional.mse_loss(x, target)]))
    True
    """
    tensors = list(tensors)
    yield from _without_graph(tensors)
    for node in _nodes(tensors):
        yield from saved_tensors(node)


def _is_view_of_leaf(node: Any) -> bool:
    """Whether ``node`` only reshapes a parameter, as a layer does with its weight."""
    return node.name().startswith(VIEWS) and all(hasattr(following, "variable") for following, _ in node.next_functions)


def normalizes_by_torch(tensors: Iterable[torch.Tensor | GradientEdge]) -> bool:
    """Whether the graph of ``tensors`` contains a batch normalization in training by torch itself, over one rank's batch.

    >>> normalizes_by_torch([torch.nn.BatchNorm1d(2)(torch.ones(3, 2))])
    True
    """
    return any("BatchNormBackward0" in node.name() and _of_several_samples(node) for node in _nodes(tensors))


def _of_several_samples(node: Any) -> bool:
    """An instance normalization is a batch normalization of one sample with the channels of all."""
    with suppress(RuntimeError):  # an earlier backward has freed what it saved
        return saved_training(node) and saved_input(node).shape[0] > 1
    return False


def _nodes(tensors: Iterable[torch.Tensor | GradientEdge]) -> Iterator[Any]:
    """The nodes of the graph behind ``tensors``, each once; on a single path the newest come first."""
    nodes = [
        tensor.node if isinstance(tensor, GradientEdge) else get_gradient_edge(tensor).node for tensor in tensors if _differentiable(tensor)
    ]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)


def _without_graph(tensors: Iterable[torch.Tensor | GradientEdge]) -> list[torch.Tensor]:
    """Those of ``tensors`` that no backward can start from."""
    return [tensor for tensor in tensors if isinstance(tensor, torch.Tensor) and not tensor.requires_grad]


def _differentiable(tensor: torch.Tensor | GradientEdge) -> bool:
    return isinstance(tensor, GradientEdge) or tensor.requires_grad
