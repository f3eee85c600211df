"""``clip_grad_norm_`` over sharded gradients: it reduces a single number."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import utils

from parwrap.intercept.clipping import Clip
from parwrap.torch_private.fsdp import clip_grads_with_norm_

__all__ = ["clip_by_norm"]


def clip_by_norm(
    clip: Clip, device: torch.device, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
) -> torch.Tensor:
    """Clip, and return the norm over all ranks; called on all of them.

    Args:
        clip: the intercepted call.
        device: the device for the reduction.
        max_norm: as in torch, like the rest.
    """
    grads: list[Any] = [p.grad for p in clip.parameters if p.grad is not None]
    parts = [grad.to_local() for grad in grads if hasattr(grad, "to_local")]
    whole = [grad for grad in grads if not hasattr(grad, "to_local")]
    largest, norm_type = norm_type == math.inf, float(norm_type)
    local = utils.get_total_norm([part for part in parts if part.numel()], norm_type, foreach=foreach).to(device, torch.float64)
    reduced = local if largest else local**norm_type
    dist.all_reduce(reduced, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
    norms = [reduced if largest else reduced ** (1 / norm_type)]
    if whole:
        norms.append(utils.get_total_norm(whole, norm_type, foreach=foreach).to(norms[0]))
    norm = torch.linalg.vector_norm(torch.stack(norms), norm_type).to(parts[0])
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be clipped. To disable this "
            "error and scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    clip_grads_with_norm_(clip.parameters, max_norm, norm, foreach)
    return norm
