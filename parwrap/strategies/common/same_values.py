"""Copies one rank's values of parameters to all ranks, and separates real differences from rounding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from parwrap.group.collectives import sums_of
from parwrap.group.group import Group
from parwrap.strategies.common.agreement import is_stand_in

__all__ = ["BUILT_APART", "take_values"]

ULPS = 256
"""Roundings of a parameter's largest value by which linear algebra in an initialization (qr, svd, lstsq) may differ between processes."""

BUILT_APART = (
    "Build the model inside the decorated function, or set the seed before you build it. If you already do, look for other sources of "
    "different values: a separate generator with another seed, the time, or the rank."
)
"""Advice for ranks that have built different parameters."""


@torch.no_grad()
def take_values(different: Sequence[torch.Tensor], source: int, group: Group) -> bool:
    """Copy rank ``source``'s values of the parameters that are ``different``; called on all ranks.

    Returns:
        Whether they differ by more than rounding on any rank. The answer is the same on all ranks.
    """
    apart = False
    for p in different:
        values = p.detach().contiguous()
        mine = values.clone()
        dist.broadcast(values, source)
        apart |= not (is_stand_in(p) or _is_rounding(mine, values))
        p.data.copy_(values)  # .data: the graph of the running step has saved these tensors, and must not find them changed
    return bool(sums_of([apart], group)[0])


def _is_rounding(mine: torch.Tensor, others: torch.Tensor) -> bool:
    if not mine.is_floating_point() or not mine.numel():
        return torch.equal(mine, others)
    most = float(others.abs().max()) * ULPS * torch.finfo(mine.dtype).eps
    return bool(((mine - others).abs() <= min(most, 1e-3 * float(others.abs().max()))).all())
