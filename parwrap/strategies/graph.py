"""What a backward reaches and where it was called from: reading the autograd graph and the call stack, changing neither."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from types import FrameType

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

__all__ = ["call_site", "location", "reached"]

DEPTH = 12
"""Frames that tell one call site from another: enough to see through a script's own helper functions."""

_OURS = tuple(os.path.dirname(str(module.__file__)) + os.sep for module in (torch, sys.modules["parwrap"]))


def reached(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The leaf tensors that would get a gradient from a backward of ``tensors``, those nearest to the start first.

    >>> weight, x = torch.nn.Parameter(torch.ones(2)), torch.ones(2)
    >>> [leaf is weight for leaf in reached([(weight * x).sum()])]
    [True]
    """
    nodes = [
        tensor.node if isinstance(tensor, GradientEdge) else get_gradient_edge(tensor).node for tensor in tensors if _differentiable(tensor)
    ]
    found = {}
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):
            found[id(node.variable)] = node.variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return list(found.values())


def _differentiable(tensor: torch.Tensor | GradientEdge) -> bool:
    return isinstance(tensor, GradientEdge) or tensor.requires_grad


def call_site() -> tuple:
    """A key for where in the user's script the running call comes from; two helpers' callers have different keys."""
    frame: FrameType | None = sys._getframe(1)
    key: list[int] = []
    while frame is not None and len(key) < 2 * DEPTH:
        key += (id(frame.f_code), frame.f_lasti)  # a code object hashes all that is in it, which takes longer than the walk
        frame = frame.f_back
    return tuple(key)


def location() -> str:
    """File and line in the user's script that the running call comes from."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
