"""Makes parameters take part in a backward without a gradient: those that this rank's loss does not reach, so that no other rank waits for
them.

``gradient_averager.py`` decides which parameters, and when.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from parwrap.torch_private.autograd import tensor_hooks

__all__ = ["send_nothing", "send_nothing_once"]

TWICE = "Expected to mark a variable ready only once"
"""Torch's error for a parameter that has taken part in a backward already."""

BACKWARD = torch.autograd.backward
"""Torch's own function, which bypasses the patches of the user's calls."""


class _Nothing(torch.autograd.Function):
    """Makes parameters take part in a backward without a gradient."""

    @staticmethod
    def forward(ctx: Any, sparse: frozenset[int], *parameters: torch.Tensor) -> torch.Tensor:
        ctx.nothing = [_sparse_nothing(p) if id(p) in sparse else None for p in parameters]
        return torch.zeros((), device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        return (None, *ctx.nothing)


def send_nothing(parameters: Sequence[torch.Tensor], sparse: frozenset[int], *roots: torch.Tensor) -> None:
    """Make ``parameters``, including frozen ones, take part in a backward of ``roots`` without a gradient.

    Args:
        parameters: leaf tensors.
        sparse: the ids of those that get sparse gradients.
        roots: the other roots of the backward.
    """
    frozen = [p for p in parameters if not p.requires_grad]
    for p in frozen:
        p.requires_grad_(True)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            nothing = [_Nothing.apply(sparse, *parameters)] if parameters else []
            BACKWARD((*nothing, *roots))
    finally:
        for p in frozen:
            p.requires_grad_(False)


def send_nothing_once(parameters: Sequence[torch.Tensor], sparse: frozenset[int], *roots: torch.Tensor) -> bool:
    """Like :func:`send_nothing`, without the hooks of the tensors, which may raise; returns false if the tensors have taken part
    already."""
    hooks = [(each, dict(each)) for p in parameters if (each := tensor_hooks(p))]
    for each, _ in hooks:
        each.clear()
    try:
        send_nothing(parameters, sparse, *roots)
    except RuntimeError as error:
        if TWICE not in str(error):
            raise
        return False
    finally:
        for each, kept in hooks:
            each.update(kept)
    return True


def _sparse_nothing(like: torch.Tensor) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        torch.zeros((1, 0), dtype=torch.int64), torch.zeros((0, *like.shape[1:]), dtype=like.dtype), like.shape, device=like.device
    )
